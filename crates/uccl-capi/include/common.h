/* Installed beside uccl_engine.h because programs written for UCCL include it, and rely on the headers that it includes.
 * It declares nothing of this library. */
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
