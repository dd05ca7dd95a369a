/* Memory nodes: groups of processors, each near to a part of the memory. One that is not asked about, unless more are set. */
#ifndef NATIVE_MEMORY_NODES_H
#define NATIVE_MEMORY_NODES_H

#include <stdint.h>

#include "common/dispatch.h"

enum { MAX_NODES = 16, PROCESSOR_WORDS = 16 };

/* The processors of `count` nodes, PROCESSOR_WORDS words of 64 bits each; before the first job of the pool. Returns how many
 * nodes there are from now on: as many as before where `count` is not 1 to MAX_NODES. */
EXPORT int nodes_set(int count, const uint64_t *processors);

/* Zeroes a byte of each page of `size` bytes that were not written yet. Every node does so with one part, in their order, by
 * which the part comes to lie on it. */
EXPORT void nodes_touch(void *memory, int64_t size);

/* Lets the system provide the pages of `size` bytes, whose content stays, while other threads may write to them. On several
 * nodes nothing is done: each page comes to lie on the node that writes to it first. */
EXPORT void pages_touch(void *memory, int64_t size);

int node_count(void);

/* The node that the calling thread runs on; 0 where that is not known. */
int node_current(void);

/* Keeps the calling thread on the processors of a node, if there are several nodes. */
void node_stay_on(int node);

#endif
