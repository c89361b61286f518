// What cffi's generated module needs to see before its own code.
#include "minfer.h"
