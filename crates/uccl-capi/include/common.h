/* Installed beside uccl_engine.h because programs that were written for UCCL include it, and rely on what comes with it.
 * There is nothing of this library's own in it. */
#ifndef UCCL_COMMON_H
#define UCCL_COMMON_H

#include <stddef.h>
#include <stdint.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#endif
