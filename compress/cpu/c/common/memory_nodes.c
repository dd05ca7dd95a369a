#include "common/memory_nodes.h"

#include <pthread.h>
#include <stdbool.h>
#include <string.h>
#if defined(__linux__)
#include <sched.h>
#endif

static const int64_t SMALLEST_PAGE = 4096;

static struct {
    int count;
    uint64_t processors[MAX_NODES][PROCESSOR_WORDS];
} nodes = {.count = 1};

/* Part of some memory that a node is to have. */
typedef struct {
    char *begin, *end;
    int node;
} Part;

int node_count(void) { return nodes.count; }

int nodes_set(int count, const uint64_t *processors) {
    if (count < 1 || count > MAX_NODES) return nodes.count;
    memcpy(nodes.processors, processors, (size_t)count * sizeof nodes.processors[0]);
    return nodes.count = count;
}

#if defined(__linux__)
static bool has(int node, int processor) { return nodes.processors[node][processor / 64] >> processor % 64 & 1; }

int node_current(void) {
    const int processor = nodes.count > 1 ? sched_getcpu() : -1;
    for (int node = 0; processor >= 0 && processor < 64 * PROCESSOR_WORDS && node < nodes.count; node++)
        if (has(node, processor)) return node;
    return 0;
}

void node_stay_on(int node) {
    if (nodes.count < 2) return;
    cpu_set_t set;
    CPU_ZERO(&set);
    for (int processor = 0; processor < 64 * PROCESSOR_WORDS && processor < CPU_SETSIZE; processor++)
        if (has(node, processor)) CPU_SET(processor, &set);
    /* Refused where processors were taken away meanwhile: the thread then runs anywhere, more slowly. */
    (void)sched_setaffinity(0, sizeof set, &set);
}
#else
int node_current(void) { return 0; }
void node_stay_on(int node) { (void)node; }
#endif

static void *touch(void *argument) {
    const Part *part = argument;
    node_stay_on(part->node);
    for (volatile char *page = part->begin; page < part->end; page += SMALLEST_PAGE) *page = 0;
    return NULL;
}

void nodes_touch(void *memory, int64_t size) {
    if (nodes.count < 2) return;
    pthread_t threads[MAX_NODES];
    Part parts[MAX_NODES];
    int started = 0;
    for (; started < nodes.count; started++) {
        char *begin = (char *)memory + size * started / nodes.count, *end = (char *)memory + size * (started + 1) / nodes.count;
        parts[started] = (Part){begin, end, started};
        if (pthread_create(&threads[started], NULL, touch, &parts[started])) break;
    }
    for (int i = 0; i < started; i++) pthread_join(threads[i], NULL);
}

void pages_touch(void *memory, int64_t size) {
    if (nodes.count > 1) return;
    for (char *page = memory, *end = page + size; page < end; page += SMALLEST_PAGE) {
        char zero = 0;
        __atomic_compare_exchange_n(page, &zero, 0, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
    }
}
