/* Shared declarations of the planner kernel: one problem, one current state, scratch memory.
 *
 * A state says, per storage, whether it is kept across the start of backward (KEEP), recomputed (DROP) or,
 * for planners that add transfers, moved off the device (OFFLOAD); and per backward segment which storages
 * are forgotten again after it. Sizes are bytes, times seconds. All functions work on the state in Ctx. */
#ifndef FXMEM_KERNEL_H
#define FXMEM_KERNEL_H
#include <stdint.h>
#include <stdlib.h>

enum { DROP = 0, KEEP = 1, OFFLOAD = 2 };
enum { T_UNSAVE = 0, T_SAVE = 1, T_ADD = 2, T_REMOVE = 3 };

typedef struct { int type, s, b; } Toggle;

typedef struct {
    double extra;   /* seconds above running every kernel once */
    int64_t peak;   /* bytes above base */
    double over;    /* sum over segments of bytes above the room */
    int worst;      /* step of the peak: >= 0 backward step, < 0 forward kernel -1-k */
} Eval;

typedef struct {
    int N, nf, S;
    int *rp, *ri, *wp, *wi;         /* reads and writes of charged storages, CSR by kernel */
    int *cp, *ci;                   /* reading kernels by storage, CSR, ascending */
    double *sec, total;
    int64_t *ws, *nb;
    uint8_t *rec, *keep, *cand;     /* rec: 0 runs once, 1 as often as needed (never, too), 2 at least once;
                                       cand: a decision exists for this storage */
    int *prod;
    int *cls;                       /* storages that play the same part in identical blocks share a class */
    /* state */
    uint8_t *saved;
    int *head, *next, *val, drops, cap_drops, free_drop;
    int *aptr, *aval;               /* per segment: recomputed values that the settled state does not use again */
    /* result of the last evaluation */
    int *E, *seg, num_steps, cap_steps;
    int64_t *mem, *fwmem, keep_bytes;
    uint8_t *run, *need, *used;
    /* scratch */
    uint8_t *avail, *mark;
    int *stk, *stp, *last, *stamp, clock;
    int64_t *work;                  /* kernels visited so far, by all that share the counter: a measure of effort */
    uint64_t rng;
} Ctx;

typedef struct { uint8_t *saved; int *head, *next, *val, drops, free_drop; } Snapshot;

void fx_clear(Ctx *c);
void fx_unsettle(Ctx *c);
Eval fx_eval(Ctx *c, int64_t room);
void fx_apply(Ctx *c, Toggle t);
Toggle fx_inverse(Toggle t);
int fx_has_drop(const Ctx *c, int b, int s);
double fx_uniform(Ctx *c);
double fx_normal(Ctx *c);
int fx_emit_missing(Ctx *c, int top, int segment);
void fx_touches_before(Ctx *c, int worst);
void fx_settle(Ctx *c);
Snapshot fx_snap_new(const Ctx *c);
void fx_snap_take(const Ctx *c, Snapshot *s);
void fx_snap_put(Ctx *c, const Snapshot *s);
void fx_snap_free(Snapshot *s);

enum { VISITS_PER_EVAL = 16 };   /* what an evaluation costs beside its visits, which matters in small problems */

/* Is more than `deadline` work done (0: no limit)? */
static inline int fx_is_late(const Ctx *c, int64_t deadline) { return deadline > 0 && *c->work > deadline; }

/* qsort, also of nothing: its pointer may not be null even then. */
static inline void fx_sort(void *at, int n, size_t size, int (*compare)(const void *, const void *)) {
    if (n > 1) qsort(at, (size_t)n, size, compare);
}

/* First and last backward step of the segment of backward step t. */
static inline void fx_segment(const Ctx *c, int t, int *first, int *last) {
    *first = *last = t;
    while (*first > 0 && c->seg[*first - 1] == c->seg[t]) --*first;
    while (*last + 1 < c->num_steps && c->seg[*last + 1] == c->seg[t]) ++*last;
}

/* Bytes while kernel k runs, given the bytes alive after it; updates `need` and `*alive` to before it.
 * A re-created copy of a storage that is kept to the end is a transient: readers use the kept one. */
static inline int64_t fx_step_back(Ctx *c, int k, int recompute, int64_t *alive) {
    int64_t during = *alive + c->ws[k];
    for (int i = c->wp[k]; i < c->wp[k + 1]; i++) {
        int w = c->wi[i];
        if (c->need[w] && !(recompute && c->keep[w])) { c->need[w] = 0; *alive -= c->nb[w]; }
        else during += c->nb[w];
    }
    for (int i = c->rp[k]; i < c->rp[k + 1]; i++) {
        int r = c->ri[i];
        if (!c->need[r]) { c->need[r] = 1; *alive += c->nb[r]; during += c->nb[r]; }
    }
    return during;
}
#endif
