/* A call that must go well: its error ends the program. */
#ifndef WELL_H
#define WELL_H

#include <uccl.h>

#include "check.h"

#define WELL(call)                                                                                                 \
  do {                                                                                                             \
    uccl_status_t got = (call);                                                                                    \
    if (got) {                                                                                                     \
      fprintf(stderr, "%s:%d: %s: %s: %s\n", __FILE__, __LINE__, #call, uccl_status_name(got), uccl_last_error()); \
      exit(1);                                                                                                     \
    }                                                                                                              \
  } while (0)

#endif
