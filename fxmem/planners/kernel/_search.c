/* Local search over states: greedy repair of an overflow, polish of what became unnecessary, randomised search. */
#include "_kernel.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_FORCED = 12 };
#define PRICE 0.01   /* of a byte over the room in one segment, in steps per room */

typedef struct { Toggle t; double ratio, extra, over; } Move;

typedef struct { Move *at; int n, cap; } Moves;

static void push(Moves *m, int type, int s, int b) {
    if (m->n == m->cap) {
        m->cap = m->cap ? 2 * m->cap : 256;
        m->at = realloc(m->at, sizeof(Move) * (size_t)m->cap);
    }
    Move v = {{type, s, b}, 0.0, 0.0, -HUGE_VAL};
    m->at[m->n++] = v;
}

/* Storages alive at step `worst` that it neither reads nor creates, in c->need after this call. */
static void alive_across(Ctx *c, int worst) {
    int kernel = worst >= 0 ? c->E[worst] : -1 - worst;
    memcpy(c->need, c->keep, (size_t)c->S);
    for (int t = c->num_steps - 1; t > worst && t >= 0; t--) {
        int k = c->E[t];
        for (int i = c->wp[k]; i < c->wp[k + 1]; i++)
            if (!(k < c->nf && c->keep[c->wi[i]])) c->need[c->wi[i]] = 0;
        for (int i = c->rp[k]; i < c->rp[k + 1]; i++) c->need[c->ri[i]] = 1;
    }
    for (int k = c->nf - 1; worst < 0 && k > kernel; k--) {
        if (!c->run[k]) continue;
        for (int i = c->wp[k]; i < c->wp[k + 1]; i++) c->need[c->wi[i]] = 0;
        for (int i = c->rp[k]; i < c->rp[k + 1]; i++) c->need[c->ri[i]] = 1;
    }
    for (int i = c->wp[kernel]; i < c->wp[kernel + 1]; i++) c->need[c->wi[i]] = 0;
    for (int i = c->rp[kernel]; i < c->rp[kernel + 1]; i++) c->need[c->ri[i]] = 0;
}

/* c->last[s]: segment of the last touch of s before step `worst` (-1: none in backward);
 * c->avail[s]: 1 if its instance there was made in backward. */
void fx_touches_before(Ctx *c, int worst) {
    for (int s = 0; s < c->S; s++) { c->last[s] = -1; c->avail[s] = 0; }
    for (int t = 0; t < worst; t++) {
        int k = c->E[t];
        for (int i = c->wp[k]; i < c->wp[k + 1]; i++) { c->last[c->wi[i]] = c->seg[t]; c->avail[c->wi[i]] = 1; }
        for (int i = c->rp[k]; i < c->rp[k + 1]; i++) c->last[c->ri[i]] = c->seg[t];
    }
}

/* Decisions that could take bytes away from the worst step. */
static void collect(Ctx *c, int worst, Moves *m) {
    m->n = 0;
    alive_across(c, worst);
    fx_touches_before(c, worst);
    for (int s = 0; s < c->S; s++) {
        if (!c->need[s] || !c->cand[s]) continue;
        if (!c->avail[s] && c->saved[s] != DROP) push(m, T_UNSAVE, s, 0);
        if (c->last[s] >= 0 && !fx_has_drop(c, c->last[s], s)) push(m, T_ADD, s, c->last[s]);
    }
    if (worst < 0) return;
    int a, z;
    fx_segment(c, worst, &a, &z);
    for (int t = a; t <= z; t++)
        for (int i = c->wp[c->E[t]]; c->E[t] < c->nf && i < c->wp[c->E[t] + 1]; i++) {
            int s = c->wi[i];
            if (!c->cand[s]) continue;
            if (c->saved[s] == DROP) push(m, T_SAVE, s, 0);
            if (c->last[s] >= 0 && fx_has_drop(c, c->last[s], s)) push(m, T_REMOVE, s, c->last[s]);
        }
}

static void rate(Ctx *c, Move *m, Eval now, int64_t room) {
    fx_apply(c, m->t);
    Eval e = fx_eval(c, room);
    fx_apply(c, fx_inverse(m->t));
    m->extra = e.extra - now.extra;
    m->over = now.over - e.over;
    m->ratio = m->over <= 0.5 ? HUGE_VAL : (m->extra + 1e-9 * c->total) / m->over;
    if (m->ratio < 0) m->ratio = -1.0 / (1e-30 - m->ratio);   /* both better: larger gains first */
}

/* What is known of a kind of decision, by class of storage: its last ratio, and the round it was last looked at. */
typedef struct { double *ratio; int *seen, round, n; } Guess;

static int kind(const Ctx *c, const Guess *g, Toggle t) {
    return c->cls[t.s] + g->n * (t.type == T_UNSAVE ? 0 : t.type == T_ADD ? 1 : 2);
}

static int by_ratio(const void *a, const void *b) {
    double x = ((const Move *)a)->ratio, y = ((const Move *)b)->ratio;
    return (x > y) - (x < y);
}

/* Lazily find the best move: remembered ratios order the look, at most `look` looks beyond the best found so far, and one
 * look at each class. */
static int best_move(Ctx *c, Moves *m, Guess *g, Eval now, int64_t room, int look, double noise) {
    for (int i = 0; i < m->n; i++) {
        m->at[i].ratio = g->ratio[kind(c, g, m->at[i].t)];
        if (noise > 0) m->at[i].ratio *= exp(noise * fx_normal(c));
    }
    fx_sort(m->at, m->n, sizeof(Move), by_ratio);
    int best = -1, left = look;
    g->round++;
    for (int i = 0; i < m->n; i++) {
        int at = kind(c, g, m->at[i].t);
        double known = m->at[i].ratio;
        if (best >= 0 && left <= 0 && known > m->at[best].ratio) break;
        if (g->seen[at] == g->round) continue;
        left--;
        rate(c, m->at + i, now, room);
        if (m->at[i].ratio < HUGE_VAL) g->seen[at] = g->round;
        g->ratio[at] = m->at[i].ratio == HUGE_VAL ? 1e6 * (fabs(known) + 1e-30) : m->at[i].ratio;
        if (m->at[i].ratio < HUGE_VAL && (best < 0 || m->at[i].ratio < m->at[best].ratio)) { best = i; left = look; }
    }
    return best;
}

static Guess new_guess(Ctx *c) {
    size_t n = (size_t)c->S + 1;
    Guess g = {malloc(3 * n * sizeof(double)), calloc(3 * n, sizeof(int)), 0, c->S};
    for (int s = 0; s < c->S; s++) {
        double price = c->prod[s] < 0 ? 1.0 : (c->sec[c->prod[s]] + 1e-9 * c->total) / ((double)c->nb[s] + 1.0);
        g.ratio[s] = g.ratio[s + c->S] = price / (c->N - c->nf + 1);
        g.ratio[s + 2 * c->S] = 0.0;
    }
    return g;
}

static void free_guess(Guess *g) { free(g->ratio); free(g->seen); }

/* The values recomputed in backward whose life ends in segment b, for every b. They count as forgotten there. */
static void list_dead(Ctx *c) {
    size_t room = (size_t)c->S + 1; /* a step may write several values */
    for (int t = 0; t < c->num_steps; t++) room += (size_t)(c->wp[c->E[t] + 1] - c->wp[c->E[t]]);
    int n = 0, *seg = malloc(sizeof(int) * room), *val = malloc(sizeof(int) * room);
    memset(c->avail, 0, (size_t)c->S);
    for (int t = 0; t < c->num_steps; t++) {
        int k = c->E[t];
        for (int i = c->wp[k]; k < c->nf && i < c->wp[k + 1]; i++) {
            int w = c->wi[i];
            if (c->avail[w]) { seg[n] = c->last[w]; val[n++] = w; }
            c->avail[w] = c->cand[w];
            c->last[w] = c->seg[t];
        }
        for (int i = c->rp[k]; i < c->rp[k + 1]; i++) c->last[c->ri[i]] = c->seg[t];
    }
    for (int s = 0; s < c->S; s++) if (c->avail[s]) { seg[n] = c->last[s]; val[n++] = s; }
    memset(c->aptr, 0, sizeof(int) * ((size_t)c->N + 2));
    for (int i = 0; i < n; i++) c->aptr[seg[i] + 1]++;
    for (int b = 0; b <= c->N; b++) c->aptr[b + 1] += c->aptr[b];
    free(c->aval);
    c->aval = malloc(sizeof(int) * room);
    for (int i = n; i-- > 0;) c->aval[--c->aptr[seg[i] + 1]] = val[i];
    for (int b = 0; b <= c->N; b++) c->aptr[b] = c->aptr[b + 1];
    c->aptr[c->N + 1] = c->aptr[c->N] = n;
    free(seg); free(val);
}

/* Make what the last evaluation did explicit, without changing it. Keeps that it found unused are dropped, and values
 * recomputed but not used again count as forgotten: else the next decision would silently hold on to them. */
void fx_settle(Ctx *c) {
    for (int s = 0; s < c->S; s++) if (c->cand[s] && c->saved[s] == KEEP && !c->used[s]) c->saved[s] = DROP;
    fx_touches_before(c, c->num_steps);
    for (int b = c->nf; b < c->N; b++) {
        for (int i = c->head[b], after; i >= 0; i = after) {
            after = c->next[i];
            if (c->last[c->val[i]] <= b) fx_apply(c, (Toggle){T_REMOVE, c->val[i], b});
        }
        for (int i = c->aptr[b]; i < c->aptr[b + 1]; i++)
            if (c->saved[c->aval[i]] == DROP && c->last[c->aval[i]] > b) fx_apply(c, (Toggle){T_ADD, c->aval[i], b});
    }
    list_dead(c);
}

static void apply_range(Ctx *c, const Moves *m, const int *at, int from, int to, int undo) {
    for (int i = from; i < to; i++) fx_apply(c, undo ? fx_inverse(m->at[at[i]].t) : m->at[at[i]].t);
}

/* Move `best` paid: take the same decision for others of its class, in doubling groups, while they pay about as well. */
static Eval repeat_in_class(Ctx *c, Moves *m, int best, Eval e, int64_t room) {
    Move like = m->at[best];
    int *at = malloc(sizeof(int) * (size_t)(m->n + 1)), n = 0;
    for (int i = 0; i < m->n; i++)
        if (i != best && m->at[i].t.type == like.t.type && c->cls[m->at[i].t.s] == c->cls[like.t.s]) at[n++] = i;
    for (int from = 0, size = 1; from < n && e.peak > room && like.extra > 0; size *= 2) {
        int need = 1 + (int)(e.over / like.over);
        int to = from + size < n ? from + size : n;
        if (to - from > need) to = from + need;
        apply_range(c, m, at, from, to, 0);
        Eval f = fx_eval(c, room);
        if (f.over > e.over - 0.5 * like.over * (to - from) || f.extra > e.extra + 1.2 * like.extra * (to - from)) {
            apply_range(c, m, at, from, to, 1);
            e = fx_eval(c, room);
            break;
        }
        e = f;
        from = to;
    }
    free(at);
    return e;
}

/* When every decision about the worst step makes the overflow grow elsewhere: the one that costs least, a byte over the
 * room being worth `price` seconds. -1 if there is none. */
static int least_bad(const Moves *m, double price) {
    int best = -1;
    for (int i = 0; i < m->n; i++) {
        if (m->at[i].over == -HUGE_VAL) continue;
        if (best < 0 || m->at[i].extra - price * m->at[i].over < m->at[best].extra - price * m->at[best].over) best = i;
    }
    return best;
}

/* Toggle the cheapest decisions until the peak is within the room. Where none helps, some are forced, and what was forced
 * is not decided about again. Returns 1 if the peak fits. */
int fx_repair(Ctx *c, int64_t room, int look, int rounds, double noise, int64_t deadline, Eval *out) {
    Guess g = new_guess(c);
    Moves m = {0, 0, 0};
    Eval e = fx_eval(c, room);
    uint8_t *forced = calloc((size_t)c->S + 1, 1);
    double price = PRICE * c->total / ((double)room + 1.0);
    if (noise > 0) price *= exp(2.0 * fx_normal(c));
    fx_settle(c);
    for (int left = MOST_FORCED; e.peak > room && rounds-- > 0 && e.over < HUGE_VAL && !fx_is_late(c, deadline);) {
        collect(c, e.worst, &m);
        for (int i = m.n; i-- > 0;) if (forced[m.at[i].t.s]) m.at[i] = m.at[--m.n];
        int i = best_move(c, &m, &g, e, room, look, noise), ok = i >= 0;
        if (!ok && left-- > 0) i = least_bad(&m, price);
        if (i < 0) break;
        fx_apply(c, m.at[i].t);
        if (!ok) forced[m.at[i].t.s] = 1;
        e = fx_eval(c, room);
        if (ok) e = repeat_in_class(c, &m, i, e, room);
        fx_settle(c);
    }
    free_guess(&g); free(m.at); free(forced);
    *out = e;
    return e.peak <= room;
}

static int by_price(const void *a, const void *b) {
    double x = ((const Move *)a)->extra, y = ((const Move *)b)->extra;
    return (x < y) - (x > y);
}

static void decisions(Ctx *c, Moves *m) {
    m->n = 0;
    for (int s = 0; s < c->S; s++)
        if (c->cand[s] && c->saved[s] == DROP) push(m, T_SAVE, s, 0);
    for (int b = c->nf; b < c->N; b++)
        for (int i = c->head[b]; i >= 0; i = c->next[i]) push(m, T_REMOVE, c->val[i], b);
    for (int i = 0; i < m->n; i++) m->at[i].extra = c->sec[c->prod[m->at[i].t.s]];
}

static int accepts(Ctx *c, Eval *e, int64_t room, int removes) {
    Eval f = fx_eval(c, room);
    int better = f.extra < e->extra - 1e-12 * c->total;
    if (f.peak > room || !(better || (removes && f.extra <= e->extra))) return 0;
    *e = f;
    fx_settle(c);
    return 1 + better;
}

/* One pass over all decisions to undo, dearest first, class by class in halving groups. Returns whether time fell. */
static int polish_pass(Ctx *c, Moves *m, Eval *e, int64_t room, int *looks, int64_t deadline) {
    int gain = 0, *at = malloc(sizeof(int) * (size_t)(m->n + 1));
    uint8_t *done = calloc((size_t)m->n + 1, 1);
    for (int i = 0; i < m->n && *looks > 0 && !fx_is_late(c, deadline); i++) {
        int n = 0;
        if (done[i]) continue;
        for (int j = i; j < m->n && c->sec[c->prod[m->at[j].t.s]] >= 0.5 * m->at[i].extra; j++)
            if (m->at[j].t.type == m->at[i].t.type && c->cls[m->at[j].t.s] == c->cls[m->at[i].t.s]) at[n++] = j, done[j] = 1;
        for (int from = 0, size = n; from < n;) {
            int to = from + size < n ? from + size : n;
            apply_range(c, m, at, from, to, 0);
            --*looks;
            int ok = accepts(c, e, room, m->at[i].t.type == T_REMOVE);
            if (!ok) apply_range(c, m, at, from, to, 1);
            gain |= ok == 2;
            if (ok) { from = to; size *= 2; }
            else if (size > 1) size /= 2;
            else from += 1 + n / 4;   /* elsewhere in the row of blocks it may still pay */
        }
    }
    free(at); free(done);
    return gain;
}

/* Undo decisions wherever time falls (or stays, with fewer of them) and the peak still fits, in at most `looks` looks. */
void fx_polish(Ctx *c, int64_t room, int looks, int64_t deadline, Eval *out) {
    Moves m = {0, 0, 0};
    Eval e = fx_eval(c, room);
    fx_settle(c);
    for (int gain = 1, left = 3; gain && left > 0 && looks > 0 && e.peak <= room; left--) {
        decisions(c, &m);
        fx_sort(m.at, m.n, sizeof(Move), by_price);
        gain = polish_pass(c, &m, &e, room, &looks, deadline);
    }
    *out = fx_eval(c, room);
    free(m.at);
}

Snapshot fx_snap_new(const Ctx *c) {
    Snapshot s;
    size_t n = (size_t)c->cap_drops;
    s.saved = malloc((size_t)c->S + 1);
    s.head = malloc(sizeof(int) * ((size_t)c->N + 1));
    s.next = malloc(sizeof(int) * n); s.val = malloc(sizeof(int) * n);
    return s;
}

void fx_snap_take(const Ctx *c, Snapshot *s) {
    memcpy(s->saved, c->saved, (size_t)c->S);
    memcpy(s->head, c->head, sizeof(int) * ((size_t)c->N + 1));
    memcpy(s->next, c->next, sizeof(int) * (size_t)c->cap_drops);
    memcpy(s->val, c->val, sizeof(int) * (size_t)c->cap_drops);
    s->drops = c->drops; s->free_drop = c->free_drop;
}

void fx_snap_put(Ctx *c, const Snapshot *s) {
    memcpy(c->saved, s->saved, (size_t)c->S);
    memcpy(c->head, s->head, sizeof(int) * ((size_t)c->N + 1));
    memcpy(c->next, s->next, sizeof(int) * (size_t)c->cap_drops);
    memcpy(c->val, s->val, sizeof(int) * (size_t)c->cap_drops);
    c->drops = s->drops; c->free_drop = s->free_drop;
    fx_unsettle(c);
}

void fx_snap_free(Snapshot *s) { free(s->saved); free(s->head); free(s->next); free(s->val); }

/* A random single change: mostly one near a random step of backward. */
static Toggle random_toggle(Ctx *c, Moves *m) {
    double u = fx_uniform(c);
    if (u < 0.45 && m->n) return m->at[(int)(fx_uniform(c) * m->n)].t;
    for (int tries = 0; tries < 50; tries++) {
        int t = (int)(fx_uniform(c) * c->num_steps), k = c->E[t];
        int n = c->rp[k + 1] - c->rp[k];
        if (!n) continue;
        int s = c->ri[c->rp[k] + (int)(fx_uniform(c) * n)];
        if (!c->cand[s]) continue;
        if (u < 0.75) return (Toggle){c->saved[s] == DROP ? T_SAVE : T_UNSAVE, s, 0};
        return (Toggle){fx_has_drop(c, c->seg[t], s) ? T_REMOVE : T_ADD, s, c->seg[t]};
    }
    return (Toggle){T_REMOVE, 0, c->nf};
}

/* Undo a few random decisions, repair with noise, polish; keep what is not worse by more than a falling temperature. */
int fx_perturb(Ctx *c, int64_t room, int rounds, int strength, double temperature, int64_t deadline, Eval *out) {
    Snapshot best = fx_snap_new(c), now = fx_snap_new(c);
    Moves m = {0, 0, 0};
    Eval e = fx_eval(c, room), top = e;
    int done = 0;
    fx_snap_take(c, &best); fx_snap_take(c, &now);
    for (; done < rounds && *c->work < deadline; done++) {
        int flips = 1 + (int)(fx_uniform(c) * strength);
        decisions(c, &m);
        fx_eval(c, room);
        for (int i = 0; i < flips; i++) fx_apply(c, random_toggle(c, &m));
        Eval f;
        int ok = fx_repair(c, room, 2, 40, 0.3, deadline, &f);
        if (ok && f.extra < e.extra + 0.01 * c->total) fx_polish(c, room, m.n + 64, deadline, &f);
        double limit = e.extra - temperature * (1.0 - (double)done / rounds) * c->total * log(fx_uniform(c) + 1e-300);
        if (ok && f.extra <= limit) {
            e = f;
            fx_snap_take(c, &now);
            if (f.extra < top.extra - 1e-12 * c->total) { top = f; fx_snap_take(c, &best); }
        } else fx_snap_put(c, &now);
    }
    fx_snap_put(c, &best);
    *out = fx_eval(c, room);
    fx_snap_free(&best); fx_snap_free(&now); free(m.at);
    return done;
}
