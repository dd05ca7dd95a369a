/* The process's one pool of threads for these kernels.
 *
 * A job is a number of chunks that may run in any order and on any thread. The caller takes chunks itself; workers take
 * some when they wake up in time. The caller never waits for a worker that has not begun, only for chunks under way, so
 * a neighbour that keeps a core busy costs that core and no more. Workers spin for some microseconds after a job (the
 * next one mostly follows at once) and then sleep. A worker that makes jobs longer, because it is interrupted inside
 * of its chunks, is left out for a while.
 *
 * Where memory has several nodes, each worker stays on one of them, a job's chunks are shared out evenly over nodes in
 * their order, and every thread takes those of its node before it helps others. Weights are read in the order of chunks:
 * `nodes_touch` puts each part of a weight on the node that will read it.
 *
 * Any thread may call `pool_run`, also from inside of a chunk: while the pool is busy a call runs its chunks alone.
 * Chunks run with denormals flushed to zero on every thread, so results do not depend on who computes them.
 * After fork() the child starts with fresh workers. */
#ifndef NATIVE_POOL_H
#define NATIVE_POOL_H

#include <stdint.h>

#include "common/dispatch.h"

enum { POOL_MAX_THREADS = 256 };

typedef void (*PoolTask)(void *context, int64_t chunk);

/* Runs task(context, 0 .. num_chunks - 1) and returns when all are done. Chunks of 20 to 200 microseconds are best. */
void pool_run(PoolTask task, void *context, int64_t num_chunks);

/* Threads per job, the caller included; returns what is set (1 to POOL_MAX_THREADS). */
EXPORT int pool_set_threads(int count);
EXPORT int pool_threads(void);

/* Threads that the measured load leaves in use at the moment. */
EXPORT int pool_active_threads(void);

#endif
