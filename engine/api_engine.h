// Layer 7: what every public function of an engine does first; api.c has the definitions.
#ifndef MF_API_ENGINE_H
#define MF_API_ENGINE_H

#include "api_args.h"
#include "engine.h"

int api_check_engine(const mf_engine *e, const char *function);
// Of an engine that is one.
int api_check_seq(const mf_engine *e, int32_t seq, const char *function);

// One call at a time. Fails only in a process forked while another thread was in a call.
int api_lock(mf_engine *e);
void api_unlock(mf_engine *e);

#endif
