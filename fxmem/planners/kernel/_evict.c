/* Look-ahead eviction: run forward and backward under the room; when an allocation does not fit, evict the storage
 * whose recomputation is cheapest per byte and per second until its next use. */
#include "_kernel.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define NEVER (1 << 30)
enum { MOST_PER_KERNEL = 2000 };   /* visits, and as many again as there are kernels: several times what is usual */

typedef struct {
    Ctx *c;
    int64_t room, used;
    double alpha, beta;
    const double *factor;          /* multiplies the score of a storage */
    uint8_t *alive;
    int *lock, *next_use, *last_fw, *ptr, *touched;
    double *chain;                 /* seconds to get a storage back; negative: to be found */
    double *start;                 /* seconds from the start of the step to kernel k, all saved */
    int now;                       /* kernel being run */
    int fits;
    int64_t deadline;              /* work after which it gives up: where hardly anything fits, values chase each other */
} Run;

static int is_lost(const Run *r) { return *r->c->work > r->deadline; }

static int local_next_use(const Run *r, int s) {
    const Ctx *c = r->c;
    int p = r->ptr[s];
    int best = p < c->cp[s + 1] ? c->ci[p] : NEVER;
    for (int i = c->cp[s]; i < c->cp[s + 1]; i++) {
        int k = c->ci[i];
        if (k >= c->nf || k >= r->now) break;
        if (!c->rec[k]) continue;
        for (int j = c->wp[k]; j < c->wp[k + 1]; j++) {
            int o = c->wi[j];
            if (!r->alive[o] && r->next_use[o] < best) best = r->next_use[o];
        }
    }
    return best;
}

static void operands_changed(Run *r, int k);

/* Bring next_use[s] up to date; a dead s passes the change on to what it would be recomputed from. */
static void update(Run *r, int s) {
    int was = r->next_use[s];
    ++*r->c->work;
    r->next_use[s] = local_next_use(r, s);
    if (r->next_use[s] != was && !r->alive[s] && !is_lost(r)) operands_changed(r, r->c->prod[s]);
}

static void operands_changed(Run *r, int k) {
    for (int i = r->c->rp[k]; k < r->c->nf && i < r->c->rp[k + 1]; i++) update(r, r->c->ri[i]);
}

/* Storage s came or went: forget the chains that lead through it. */
static void forget_chains(Run *r, int s, int stamp) {
    Ctx *c = r->c;
    for (int i = c->cp[s]; i < c->cp[s + 1] && c->ci[i] < c->nf && c->ci[i] <= r->now; i++)
        for (int j = c->wp[c->ci[i]]; j < c->wp[c->ci[i] + 1]; j++) {
            int o = c->wi[j];
            if (c->stamp[c->N + o] == stamp) continue;
            c->stamp[c->N + o] = stamp;
            ++*c->work;
            r->chain[o] = -1.0;
            if (!r->alive[o]) forget_chains(r, o, stamp);
        }
}

static void set_alive(Run *r, int s, int alive) {
    r->alive[s] = (uint8_t)alive;
    r->used += alive ? r->c->nb[s] : -r->c->nb[s];
    forget_chains(r, s, ++r->c->clock);
    operands_changed(r, r->c->prod[s]);
}

/* Seconds to get s back once evicted: its producer and every dead ancestor that would have to run. */
static double chain(Run *r, int s) {
    Ctx *c = r->c;
    double t = 0.0;
    if (r->chain[s] >= 0) return r->chain[s];
    int sp = 0, stamp = ++c->clock;
    c->stk[0] = c->prod[s];
    c->stamp[c->prod[s]] = stamp;
    while (sp >= 0) {
        int k = c->stk[sp--];
        t += c->sec[k];
        ++*c->work;
        for (int i = c->rp[k]; i < c->rp[k + 1]; i++) {
            int u = c->ri[i], p = c->prod[u];
            if (!r->alive[u] && c->stamp[p] != stamp) { c->stamp[p] = stamp; c->stk[++sp] = p; }
        }
    }
    return r->chain[s] = t;
}

static int is_evictable(const Run *r, int s) {
    const Ctx *c = r->c;
    return r->alive[s] && c->cand[s] && !r->lock[s] && c->prod[s] < r->now && r->last_fw[s] < r->now;
}

static int victim(Run *r) {
    Ctx *c = r->c;
    int best = -1;
    double low = HUGE_VAL, eps = 1e-9 * c->total;
    for (int s = 0; s < c->S; s++) {
        if (!is_evictable(r, s)) continue;
        if (r->next_use[s] == NEVER) return s;
        double wait = r->start[r->next_use[s]] - r->start[r->now] + eps;
        double cost = chain(r, s) + eps;
        double score = r->alpha == 1.0 ? cost : pow(cost, r->alpha);
        score *= r->factor[s] / ((double)c->nb[s] * (r->beta == 1.0 ? wait : pow(wait, r->beta)));
        if (score < low) { low = score; best = s; }
    }
    return best;
}

/* Also for natural deaths: a consumer evicted later must recompute s, not find it kept. */
static void evict(Run *r, int s) {
    Ctx *c = r->c;
    if (!r->alive[s]) return;
    set_alive(r, s, 0);
    if (!c->cand[s]) return;
    Toggle t = {T_ADD, s, r->touched[s]};
    if (t.b < 0) t.type = T_UNSAVE;
    fx_apply(c, t);
}

static void make_room(Run *r, int64_t bytes) {
    while (r->used + bytes > r->room) {
        int s = victim(r);
        if (s < 0) { r->fits = 0; return; }
        evict(r, s);
    }
}

/* Run kernel k, whose operands are alive and locked. */
static void run_kernel(Run *r, int k) {
    Ctx *c = r->c;
    int64_t bytes = c->ws[k];
    for (int i = c->wp[k]; i < c->wp[k + 1]; i++) bytes += c->nb[c->wi[i]];
    make_room(r, bytes);
    for (int i = c->wp[k]; i < c->wp[k + 1]; i++) {
        int w = c->wi[i];
        if (r->alive[w]) continue;
        set_alive(r, w, 1);
        r->next_use[w] = local_next_use(r, w);
        if (r->now >= c->nf) r->touched[w] = r->now;
    }
    ++*c->work;
}

static void unlock(Run *r, int k) {
    Ctx *c = r->c;
    for (int i = c->rp[k]; i < c->rp[k + 1]; i++) {
        int s = c->ri[i];
        if (--r->lock[s] > 0 || c->keep[s] || r->last_fw[s] > r->now) continue;
        update(r, s);
        if (r->next_use[s] == NEVER) evict(r, s);
    }
    for (int i = c->wp[k]; i < c->wp[k + 1]; i++) {
        int s = c->wi[i];
        if (r->lock[s] || c->keep[s] || r->last_fw[s] > r->now) continue;
        update(r, s);
        if (r->next_use[s] == NEVER) evict(r, s);
    }
}

static void acquire(Run *r, int k);

static void recompute(Run *r, int s) {
    int p = r->c->prod[s];
    acquire(r, p);
    run_kernel(r, p);
    unlock(r, p);
}

/* Bring every operand of k on the device and lock it (a lock on a dead storage keeps it once it is back). */
static void acquire(Run *r, int k) {
    Ctx *c = r->c;
    for (int i = c->rp[k]; i < c->rp[k + 1]; i++) {
        r->lock[c->ri[i]]++;
        if (r->now >= c->nf) r->touched[c->ri[i]] = r->now;
    }
    for (int i = c->rp[k]; i < c->rp[k + 1] && !is_lost(r); i++) if (!r->alive[c->ri[i]]) recompute(r, c->ri[i]);
}

static void start(Run *r) {
    Ctx *c = r->c;
    double t = 0.0;
    for (int k = 0; k < c->N; k++) { r->start[k] = t; t += c->sec[k]; }
    for (int s = 0; s < c->S; s++) {
        r->next_use[s] = NEVER;
        r->chain[s] = -1.0;
        r->touched[s] = -1;
        r->last_fw[s] = -1;
        int i = c->cp[s];
        for (; i < c->cp[s + 1] && c->ci[i] < c->nf; i++) r->last_fw[s] = c->ci[i];
        r->ptr[s] = i;
    }
}

/* Forward kernels needed only by backward are run too: repair and polish skip them where that pays. */
static void play(Run *r) {
    Ctx *c = r->c;
    for (r->now = 0; r->now < c->N && !is_lost(r); r->now++) {
        int k = r->now;
        acquire(r, k);
        run_kernel(r, k);
        for (int i = c->rp[k]; i < c->rp[k + 1]; i++) {
            int s = c->ri[i];
            while (r->ptr[s] < c->cp[s + 1] && c->ci[r->ptr[s]] <= k) r->ptr[s]++;
            update(r, s);
        }
        unlock(r, k);
    }
}

/* Fill the state with what the eviction did; returns 1 if it never ran out of room, nor out of patience. */
int fx_evict(Ctx *c, int64_t room, double alpha, double beta, const double *factor) {
    size_t n = (size_t)c->S + 1;
    int *ints = calloc(5 * n, sizeof(int));
    Run r = {c, room, 0, alpha, beta, factor, calloc(n, 1), ints, ints + n, ints + 2 * n, ints + 3 * n, ints + 4 * n,
             malloc(sizeof(double) * n), malloc(sizeof(double) * ((size_t)c->N + 1)), 0, 1, *c->work + (int64_t)c->N * (MOST_PER_KERNEL + c->N)};
    fx_clear(c);
    start(&r);
    play(&r);
    free(ints); free(r.alive); free(r.start); free(r.chain);
    return r.fits && !is_lost(&r);
}
