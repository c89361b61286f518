// The public header alone must be plain C99: this file is compiled with -std=c99 -Wpedantic -Werror.
#include "minfer.h"

int header_is_c99(void);
int header_is_c99(void) { return MF_OK; }
