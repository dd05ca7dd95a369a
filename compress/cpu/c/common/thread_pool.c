#include "common/thread_pool.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <time.h>

#include "common/memory_nodes.h"

#if ON_X86
#include <xmmintrin.h>
#endif

/* Bits of `door`: whether the current job may be entered, and how many workers are inside. */
static const uint32_t OPEN = 1u << 31;
/* Time for which workers look for the next job before they sleep, and callers for the last worker. */
static const int64_t SPIN_NANOSECONDS = 20000;
/* Load is judged over jobs that took so long together; workers that lost time rest, longer each time. */
static const int64_t WINDOW_NANOSECONDS = 10000000;
static const int64_t FIRST_REST_NANOSECONDS = 50000000;
static const int64_t LONGEST_REST_NANOSECONDS = 800000000;

typedef struct {
    int64_t busy, lost, gained; /* nanoseconds: in jobs, waiting for workers, of work that workers did */
    int64_t rest, rest_until;
    _Atomic int active; /* workers in use */
} Load;

/* Chunks [next, end) of a job that are still to be taken, in a cache line of its own. */
typedef struct {
    _Alignas(64) _Atomic int64_t next;
    int64_t end;
} Share;

typedef struct {
    pthread_mutex_t mutex; /* guards sleeping workers and callers */
    pthread_cond_t wake, left;
    atomic_flag busy;            /* held by the caller whose job runs */
    _Atomic uint32_t generation; /* counts jobs */
    _Atomic uint32_t door;
    _Atomic int sleeping;
    _Atomic int limit; /* workers that may enter */
    _Atomic int workers; /* wanted */
    int started;
    Share shares[MAX_NODES]; /* of the job's chunks, by memory node */
    PoolTask task;
    void *context;
    Load load;
} Pool;

static Pool pool = {.mutex = PTHREAD_MUTEX_INITIALIZER,
                    .wake = PTHREAD_COND_INITIALIZER,
                    .left = PTHREAD_COND_INITIALIZER,
                    .busy = ATOMIC_FLAG_INIT};
static pthread_once_t prepared = PTHREAD_ONCE_INIT;

static int64_t now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

static void pause_briefly(void) {
#if ON_X86
    _mm_pause();
#endif
}

/* Takes chunks until there are none, those of a node first; returns how many it did. */
static int64_t take_chunks(PoolTask task, void *context, Share *shares, int num_shares, int node) {
#if ON_X86
    const unsigned before = _mm_getcsr();
    _mm_setcsr(before | 0x8040); /* flush denormal results and inputs to zero */
#endif
    int64_t done = 0;
    for (int i = 0; i < num_shares; i++) {
        Share *share = &shares[(node + i) % num_shares];
        for (int64_t chunk; (chunk = atomic_fetch_add(&share->next, 1)) < share->end; done++) task(context, chunk);
    }
#if ON_X86
    _mm_setcsr(before);
#endif
    return done;
}

static void share_out(int64_t num_chunks) {
    const int num_nodes = node_count();
    for (int node = 0; node < num_nodes; node++) {
        atomic_store(&pool.shares[node].next, num_chunks * node / num_nodes);
        pool.shares[node].end = num_chunks * (node + 1) / num_nodes;
    }
}

static bool enter(void) {
    uint32_t seen = atomic_load(&pool.door);
    do {
        if (!(seen & OPEN)) return false;
    } while (!atomic_compare_exchange_weak(&pool.door, &seen, seen + 1));
    return true;
}

static void leave(void) {
    if (atomic_fetch_sub(&pool.door, 1) != 1) return;
    /* The last one out of a closed job: its caller may be asleep. */
    pthread_mutex_lock(&pool.mutex);
    pthread_cond_signal(&pool.left);
    pthread_mutex_unlock(&pool.mutex);
}

static uint32_t next_generation(uint32_t seen, int index) {
    for (;;) {
        const int64_t deadline = now() + SPIN_NANOSECONDS;
        const bool active = index < atomic_load(&pool.limit);
        do {
            for (int i = 0; i < 64; i++) {
                uint32_t generation = atomic_load(&pool.generation);
                if (generation != seen) return generation;
                pause_briefly();
            }
        } while (active && now() < deadline);
        pthread_mutex_lock(&pool.mutex);
        atomic_fetch_add(&pool.sleeping, 1);
        while (atomic_load(&pool.generation) == seen) pthread_cond_wait(&pool.wake, &pool.mutex);
        atomic_fetch_sub(&pool.sleeping, 1);
        pthread_mutex_unlock(&pool.mutex);
    }
}

static void *help(void *argument) {
    const int index = (int)(intptr_t)argument, node = (index + 1) % node_count();
    node_stay_on(node);
    for (uint32_t seen = 0;;) {
        seen = next_generation(seen, index);
        if (index >= atomic_load(&pool.limit) || !enter()) continue;
        take_chunks(pool.task, pool.context, pool.shares, node_count(), node);
        leave();
    }
    return NULL;
}

/* The child of fork() has none of the workers, and locks in any state. */
static void reset_after_fork(void) {
    const int workers = atomic_load(&pool.workers);
    pool = (Pool){.busy = ATOMIC_FLAG_INIT};
    pthread_mutex_init(&pool.mutex, NULL);
    pthread_cond_init(&pool.wake, NULL);
    pthread_cond_init(&pool.left, NULL);
    atomic_store(&pool.workers, workers);
    pool.load.active = workers;
}

static void prepare(void) { pthread_atfork(NULL, NULL, reset_after_fork); }

static void start_workers(int wanted) {
    for (; pool.started < wanted; pool.started++) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, help, (void *)(intptr_t)pool.started)) return;
        pthread_detach(thread);
    }
}

static void wait_for_workers(void) {
    const int64_t deadline = now() + SPIN_NANOSECONDS;
    do {
        for (int i = 0; i < 64; i++) {
            if (!atomic_load(&pool.door)) return;
            pause_briefly();
        }
    } while (now() < deadline);
    pthread_mutex_lock(&pool.mutex);
    while (atomic_load(&pool.door)) pthread_cond_wait(&pool.left, &pool.mutex);
    pthread_mutex_unlock(&pool.mutex);
}

/* Number of workers that the next job gets: half of them rest when waiting for them cost more than they did. */
static int workers_now(Load *load, int workers, int64_t time) {
    if (load->busy > WINDOW_NANOSECONDS) {
        if (load->lost > load->gained / 2) {
            load->rest = load->rest ? load->rest * 2 : FIRST_REST_NANOSECONDS;
            if (load->rest > LONGEST_REST_NANOSECONDS) load->rest = LONGEST_REST_NANOSECONDS;
            load->rest_until = time + load->rest;
            load->active = load->active / 2;
        } else if (load->active == workers) {
            load->rest = 0;
        }
        load->busy = load->lost = load->gained = 0;
    }
    if (time >= load->rest_until || load->active > workers) load->active = workers;
    return load->active;
}

static void run_together(PoolTask task, void *context, int64_t num_chunks) {
    const int64_t begin = now();
    int workers = workers_now(&pool.load, atomic_load(&pool.workers), begin);
    if (workers > num_chunks - 1) workers = (int)(num_chunks - 1);
    start_workers(workers);
    pool.task = task, pool.context = context;
    share_out(num_chunks);
    atomic_store(&pool.limit, workers);
    if (workers) {
        atomic_store(&pool.door, OPEN);
        atomic_fetch_add(&pool.generation, 1);
        if (atomic_load(&pool.sleeping)) {
            pthread_mutex_lock(&pool.mutex);
            pthread_cond_broadcast(&pool.wake);
            pthread_mutex_unlock(&pool.mutex);
        }
    }
    const int64_t done = take_chunks(task, context, pool.shares, node_count(), node_current());
    const int64_t finished = now();
    if (!workers) return;
    atomic_fetch_and(&pool.door, ~OPEN);
    wait_for_workers();
    const int64_t end = now();
    pool.load.busy += end - begin;
    pool.load.lost += end - finished;
    pool.load.gained += done ? (num_chunks - done) * (finished - begin) / done : end - begin;
}

void pool_run(PoolTask task, void *context, int64_t num_chunks) {
    pthread_once(&prepared, prepare);
    if (num_chunks < 2 || !atomic_load(&pool.workers) || atomic_flag_test_and_set(&pool.busy)) {
        Share all = {0, num_chunks};
        take_chunks(task, context, &all, 1, 0);
        return;
    }
    run_together(task, context, num_chunks);
    atomic_flag_clear(&pool.busy);
}

int pool_set_threads(int count) {
    if (count < 1) count = 1;
    if (count > POOL_MAX_THREADS) count = POOL_MAX_THREADS;
    atomic_store(&pool.workers, count - 1);
    return count;
}

int pool_threads(void) { return atomic_load(&pool.workers) + 1; }

int pool_active_threads(void) {
    const int workers = atomic_load(&pool.workers), active = atomic_load(&pool.load.active);
    return (active < workers ? active : workers) + 1;
}
