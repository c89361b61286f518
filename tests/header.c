// The public header alone must be plain C99: compiled with -std=c99 -Wpedantic -Werror.
#include "minfer.h"

int header_is_c99(void);
int header_is_c99(void) { return MF_OK; }
