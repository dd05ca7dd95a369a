/* Random numbers and buffers of exactly their size, which the drivers of sanitizers share. */
#ifndef TESTS_DRIVER_H
#define TESTS_DRIVER_H

#include <stdint.h>
#include <stdlib.h>

enum { FAILED_STATUS = 1, FAILED_NUMBERS = 2 };

/* From 0 to below - 1; the same numbers in every run. */
static inline int64_t draw(int64_t below) {
    static uint32_t state = 7;
    state = state * 1664525u + 1013904223u;
    return (int64_t)(state >> 8) % below;
}

/* Bytes that a sanitizer guards on both sides. */
static inline void *exactly(int64_t bytes) {
    void *memory = malloc((size_t)bytes);
    if (memory == NULL) exit(FAILED_STATUS);
    return memory;
}

#endif
