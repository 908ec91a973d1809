/* Exact evaluation of a rematerialization state: emission of backward with just-in-time recompute, then one
 * reverse liveness pass over backward and forward. */
#include "_kernel.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

static void *dup(const void *p, size_t n) {
    void *q = malloc(n ? n : 1);
    if (q && n) memcpy(q, p, n);
    return q;
}

double fx_uniform(Ctx *c) {   /* splitmix64 */
    uint64_t z = (c->rng += 0x9E3779B97F4A7C15ULL);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL;
    return (double)((z ^ (z >> 31)) >> 11) * (1.0 / 9007199254740992.0);
}

double fx_normal(Ctx *c) {
    double u = fx_uniform(c) + 1e-300, v = fx_uniform(c);
    return sqrt(-2.0 * log(u)) * cos(6.283185307179586 * v);
}

static void build_readers(Ctx *c) {
    int S = c->S, n = c->rp[c->N];
    c->cp = calloc((size_t)S + 1, sizeof(int));
    c->ci = malloc(sizeof(int) * (size_t)(n + 1));
    for (int i = 0; i < n; i++) c->cp[c->ri[i] + 1]++;
    for (int s = 0; s < S; s++) c->cp[s + 1] += c->cp[s];
    int *fill = dup(c->cp, sizeof(int) * (size_t)(S + 1));
    for (int k = 0; k < c->N; k++)
        for (int i = c->rp[k]; i < c->rp[k + 1]; i++) c->ci[fill[c->ri[i]]++] = k;
    free(fill);
}

/* Forget which recomputed values are not used again. */
void fx_unsettle(Ctx *c) { memset(c->aptr, 0, sizeof(int) * ((size_t)c->N + 2)); }

void fx_clear(Ctx *c) {
    for (int b = 0; b <= c->N; b++) c->head[b] = -1;
    for (int i = 0; i < c->cap_drops; i++) c->next[i] = i + 1 < c->cap_drops ? i + 1 : -1;
    c->free_drop = 0;
    c->drops = 0;
    fx_unsettle(c);
    memset(c->saved, KEEP, (size_t)c->S);
}

Ctx *fx_new(int N, int nf, int S, const int *rp, const int *ri, const int *wp, const int *wi, const double *sec,
            const int64_t *ws, const uint8_t *rec, const int64_t *nb, const int *prod, const uint8_t *keep,
            const uint8_t *cand, int64_t *work) {
    Ctx *c = calloc(1, sizeof(Ctx));
    size_t n = (size_t)N, s = (size_t)S;
    c->N = N; c->nf = nf; c->S = S; c->work = work;
    c->rp = dup(rp, sizeof(int) * (n + 1)); c->ri = dup(ri, sizeof(int) * (size_t)rp[N]);
    c->wp = dup(wp, sizeof(int) * (n + 1)); c->wi = dup(wi, sizeof(int) * (size_t)wp[N]);
    c->sec = dup(sec, sizeof(double) * n); c->ws = dup(ws, sizeof(int64_t) * n);
    c->rec = dup(rec, n); c->nb = dup(nb, sizeof(int64_t) * s);
    c->prod = dup(prod, sizeof(int) * s); c->keep = dup(keep, s); c->cand = dup(cand, s);
    for (int k = 0; k < N; k++) c->total += sec[k];
    for (int i = 0; i < S; i++) if (keep[i]) c->keep_bytes += nb[i];
    build_readers(c);
    c->saved = malloc(s + 1); c->avail = malloc(s + 1); c->need = malloc(s + 1); c->used = malloc(s + 1);
    c->mark = calloc(n + s + 1, 1); c->run = malloc(n + 1);
    c->last = malloc(sizeof(int) * (s + 1)); c->stamp = calloc(n + s + 1, sizeof(int));
    c->stk = malloc(sizeof(int) * (n + 1)); c->stp = malloc(sizeof(int) * (n + 1));
    c->cap_steps = 12 * N + 64;
    c->E = malloc(sizeof(int) * (size_t)c->cap_steps); c->seg = malloc(sizeof(int) * (size_t)c->cap_steps);
    c->mem = malloc(sizeof(int64_t) * (size_t)c->cap_steps); c->fwmem = malloc(sizeof(int64_t) * (n + 1));
    c->head = malloc(sizeof(int) * (n + 1));
    c->cap_drops = 4 * (S + N) + 64 + c->cap_steps;
    c->aptr = malloc(sizeof(int) * (n + 2)); c->aval = malloc(sizeof(int) * ((size_t)c->cap_steps + s));
    c->next = malloc(sizeof(int) * (size_t)c->cap_drops); c->val = malloc(sizeof(int) * (size_t)c->cap_drops);
    c->cls = malloc(sizeof(int) * (s + 1));
    for (int i = 0; i < S; i++) c->cls[i] = i;
    fx_clear(c);
    return c;
}

void fx_free(Ctx *c) {
    void *p[] = {c->rp, c->ri, c->wp, c->wi, c->cp, c->ci, c->sec, c->ws, c->nb, c->rec, c->keep, c->cand, c->cls, c->aptr, c->aval,
                 c->prod, c->saved, c->head, c->next, c->val, c->E, c->seg, c->mem, c->fwmem, c->run, c->need,
                 c->used, c->avail, c->mark, c->stk, c->stp, c->last, c->stamp};
    for (size_t i = 0; i < sizeof p / sizeof *p; i++) free(p[i]);
    free(c);
}

int fx_has_drop(const Ctx *c, int b, int s) {
    for (int i = c->head[b]; i >= 0; i = c->next[i]) if (c->val[i] == s) return 1;
    return 0;
}

static void add_drop(Ctx *c, int b, int s) {
    int i = c->free_drop;
    if (i < 0 || fx_has_drop(c, b, s)) return;
    c->free_drop = c->next[i];
    c->val[i] = s; c->next[i] = c->head[b]; c->head[b] = i;
    c->drops++;
}

static void remove_drop(Ctx *c, int b, int s) {
    for (int *p = &c->head[b]; *p >= 0; p = &c->next[*p]) {
        int i = *p;
        if (c->val[i] != s) continue;
        *p = c->next[i]; c->next[i] = c->free_drop; c->free_drop = i;
        c->drops--;
        return;
    }
}

void fx_apply(Ctx *c, Toggle t) {
    if (t.type == T_UNSAVE) c->saved[t.s] = DROP;
    else if (t.type == T_SAVE) c->saved[t.s] = KEEP;
    else if (t.type == T_ADD) add_drop(c, t.b, t.s);
    else remove_drop(c, t.b, t.s);
}

Toggle fx_inverse(Toggle t) { t.type ^= 1; return t; }

void fx_load(Ctx *c, const uint8_t *saved, int n, const int *b, const int *s) {
    fx_clear(c);
    for (int i = 0; i < c->S; i++) c->saved[i] = c->cand[i] ? saved[i] : KEEP;
    for (int i = 0; i < n; i++) if (c->cand[s[i]]) add_drop(c, b[i], s[i]);
}

static void put(int *n, int cap, int *b, int *s, int kernel, int storage) {
    if (*n < cap) { b[*n] = kernel; s[*n] = storage; }
    ++*n;
}

/* The number of drops, of which `cap` are written. Every forgotten value counts as one, also those that a settled state
 * has listed apart: loading must give the same order. */
int fx_store(const Ctx *c, uint8_t *saved, int cap, int *b, int *s) {
    int n = 0;
    memcpy(saved, c->saved, (size_t)c->S);
    for (int k = c->nf; k < c->N; k++) {
        for (int i = c->head[k]; i >= 0; i = c->next[i]) put(&n, cap, b, s, k, c->val[i]);
        for (int i = c->aptr[k]; i < c->aptr[k + 1]; i++)
            if (c->saved[c->aval[i]] == DROP && !fx_has_drop(c, k, c->aval[i])) put(&n, cap, b, s, k, c->aval[i]);
    }
    return n;
}

/* Append kernel `top` after every missing ancestor, these in captured order: depth first, the result of one branch of a
 * residual block would stand while the other is recomputed. */
int fx_emit_missing(Ctx *c, int top, int segment) {
    int sp = 0, from = c->num_steps;
    c->stk[0] = top; c->stp[0] = c->rp[top];
    while (sp >= 0) {
        int k = c->stk[sp], i = c->stp[sp];
        while (i < c->rp[k + 1] && c->avail[c->ri[i]]) i++;
        if (i < c->rp[k + 1]) {
            int p = c->prod[c->ri[i]];
            c->stp[sp] = i;
            if (sp + 1 >= c->N || !c->rec[p]) return 0;
            sp++;
            c->stk[sp] = p; c->stp[sp] = c->rp[p];
            continue;
        }
        if (c->num_steps + 1 >= c->cap_steps) return 0;
        c->E[c->num_steps] = k; c->seg[c->num_steps++] = segment;
        for (int w = c->wp[k]; w < c->wp[k + 1]; w++) c->avail[c->wi[w]] = 1;
        sp--;
    }
    for (int t = from + 1; t < c->num_steps; t++) {   /* insertion: mostly sorted already */
        int k = c->E[t], at = t;
        for (; at > from && c->E[at - 1] > k; at--) c->E[at] = c->E[at - 1];
        c->E[at] = k;
    }
    return 1;
}

static int emit(Ctx *c) {
    for (int s = 0; s < c->S; s++) c->avail[s] = (uint8_t)(c->saved[s] != DROP && c->prod[s] < c->nf);
    c->num_steps = 0;
    for (int b = c->nf; b < c->N; b++) {
        if (!fx_emit_missing(c, b, b)) return 0;
        for (int i = c->head[b]; i >= 0; i = c->next[i]) c->avail[c->val[i]] = 0;
        for (int i = c->aptr[b]; i < c->aptr[b + 1]; i++)
            if (c->saved[c->aval[i]] == DROP) c->avail[c->aval[i]] = 0;
    }
    return 1;
}

static void note(Eval *e, int64_t bytes, int step) {
    if (bytes > e->peak) { e->peak = bytes; e->worst = step; }
}

static void back_over_forward(Ctx *c, int64_t room, int64_t alive, Eval *e) {
    for (int k = c->nf - 1; k >= 0; k--) {
        int run = c->rec[k] != 1;
        for (int i = c->wp[k]; i < c->wp[k + 1]; i++) run |= c->need[c->wi[i]];
        c->run[k] = (uint8_t)run;
        c->fwmem[k] = 0;
        if (!run) { e->extra -= c->sec[k]; continue; }
        int64_t m = c->fwmem[k] = fx_step_back(c, k, 0, &alive);
        if (m > room) e->over += (double)(m - room);
        note(e, m, -1 - k);
    }
}

Eval fx_eval(Ctx *c, int64_t room) {
    Eval e = {0.0, -1, 0.0, 0};
    if (!emit(c)) { e.extra = e.over = HUGE_VAL; e.peak = INT64_MAX; *c->work += c->num_steps + VISITS_PER_EVAL; return e; }
    memcpy(c->need, c->keep, (size_t)c->S);
    int64_t alive = c->keep_bytes, worst = 0;
    for (int t = c->num_steps - 1; t >= 0; t--) {
        int k = c->E[t], redo = k < c->nf;
        if (redo) e.extra += c->sec[k];
        int64_t m = c->mem[t] = fx_step_back(c, k, redo, &alive);
        if (m > worst) worst = m;
        note(&e, m, t);
        if (t == 0 || c->seg[t - 1] != c->seg[t]) {
            if (worst > room) e.over += (double)(worst - room);
            worst = 0;
        }
    }
    memcpy(c->used, c->need, (size_t)c->S);
    back_over_forward(c, room, alive, &e);
    *c->work += c->num_steps + c->nf + VISITS_PER_EVAL;
    return e;
}

void fx_evaluate(Ctx *c, int64_t room, Eval *out) { *out = fx_eval(c, room); }
void fx_seed(Ctx *c, uint64_t seed) { c->rng = seed * 0x2545F4914F6CDD1DULL + 1; }
void fx_classes(Ctx *c, const int *cls) { memcpy(c->cls, cls, sizeof(int) * (size_t)c->S); }

/* Read back the last evaluation: backward steps, their segments and bytes, forward kernels that run. */
int fx_steps(const Ctx *c, int *E, int *seg, int64_t *mem, int64_t *fwmem, uint8_t *run, uint8_t *used) {
    memcpy(E, c->E, sizeof(int) * (size_t)c->num_steps);
    memcpy(seg, c->seg, sizeof(int) * (size_t)c->num_steps);
    memcpy(mem, c->mem, sizeof(int64_t) * (size_t)c->num_steps);
    memcpy(fwmem, c->fwmem, sizeof(int64_t) * (size_t)c->nf);
    memcpy(run, c->run, (size_t)c->nf);
    memcpy(used, c->used, (size_t)c->S);
    return c->num_steps;
}
int fx_num_steps(const Ctx *c) { return c->num_steps; }
