/* What the test programs check with. A program that hangs is ended by its alarm. */
#ifndef CHECK_H
#define CHECK_H

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#define CHECK(condition)                                                      \
  do {                                                                        \
    if (!(condition)) {                                                       \
      fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition); \
      exit(1);                                                                \
    }                                                                         \
  } while (0)

/* Entries of a folder: /proc/self/fd, /proc/self/task. */
static inline int entries(const char* folder) {
  int count = 0;
  DIR* opened = opendir(folder);
  CHECK(opened);
  while (readdir(opened)) count++;
  closedir(opened);
  return count;
}

#endif
