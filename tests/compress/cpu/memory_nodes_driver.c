/* Jobs over two memory nodes that have the same processors: the worker of node 1 begins with that node's chunks, each chunk is
 * done once, and all are done when a thread has only others' left. */
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "common/memory_nodes.h"
#include "common/thread_pool.h"

enum { CHUNKS = 64 };

static _Atomic int done[CHUNKS];
static _Atomic int entered;
static _Atomic int64_t firsts[CHUNKS];
static _Thread_local int job_of_thread;
static int job;

static void task(void *context, int64_t chunk) {
    (void)context;
    if (job_of_thread != job) { /* the first chunk of this thread in this job */
        job_of_thread = job;
        atomic_store(&firsts[atomic_fetch_add(&entered, 1)], chunk);
    }
    atomic_fetch_add(&done[chunk], 1);
    const struct timespec moment = {0, 200000};
    nanosleep(&moment, NULL);
}

int main(void) {
    uint64_t processors[3][PROCESSOR_WORDS];
    memset(processors, 0xff, sizeof processors);
    if (nodes_set(0, NULL) != 1 || nodes_set(MAX_NODES + 1, NULL) != 1) return fprintf(stderr, "counts\n"), 1;
    memset(processors[0], 0, sizeof processors[0]); /* the caller, wherever it runs, is of node 1 or 2 */
    if (nodes_set(2, processors[0]) != 2 || node_current() != 1) return fprintf(stderr, "nodes\n"), 1;
    char *memory = calloc(1, 1 << 20);
    nodes_touch(memory, 1 << 20);
    pool_set_threads(2);
    for (job = 1; job <= 20; job++) {
        memset((void *)done, 0, sizeof done);
        atomic_store(&entered, 0);
        pool_run(task, NULL, CHUNKS);
        for (int chunk = 0; chunk < CHUNKS; chunk++)
            if (atomic_load(&done[chunk]) != 1) return fprintf(stderr, "chunk %d: %d times\n", chunk, done[chunk]), 1;
        /* The caller and the only worker are of node 1. Who takes its first chunk may enter the task as the second one. */
        int began = 0;
        for (int thread = 0; thread < atomic_load(&entered); thread++) began += firsts[thread] == CHUNKS / 2;
        if (began != 1) return fprintf(stderr, "job %d: began with %d\n", job, (int)firsts[0]), 1;
    }
    free(memory);
    return 0;
}
