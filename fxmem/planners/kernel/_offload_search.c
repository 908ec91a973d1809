/* Search over three-way states: greedy repair, polish, random perturbation. A decision sets what becomes of a storage, adds or
 * removes a drop, or both. */
#include "_offload.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { NO_DROP = -1 };

typedef struct { int s, to, b, add; } Decision;   /* to: -1 for as it is; b: segment of the drop or NO_DROP */
typedef struct { Decision d; double ratio, extra; } Move;
typedef struct { Move *at; int n, cap; } Moves;
typedef struct { int was, drop; } Undo;

static void push(Moves *m, int s, int to, int b, int add) {
    if (m->n == m->cap) {
        m->cap = m->cap ? 2 * m->cap : 256;
        m->at = realloc(m->at, sizeof(Move) * (size_t)m->cap);
    }
    m->at[m->n++] = (Move){{s, to, b, add}, 0.0, 0.0};
}

static Undo apply(Ctx *c, Decision d) {
    Undo u = {c->saved[d.s], 0};
    if (d.to >= 0) c->saved[d.s] = (uint8_t)d.to;
    if (d.b != NO_DROP) {
        int before = c->drops;
        fx_apply(c, (Toggle){d.add ? T_ADD : T_REMOVE, d.s, d.b});
        u.drop = c->drops - before;
    }
    return u;
}

static void undo(Ctx *c, Decision d, Undo u) {
    c->saved[d.s] = (uint8_t)u.was;
    if (u.drop) fx_apply(c, (Toggle){u.drop > 0 ? T_REMOVE : T_ADD, d.s, d.b});
}

/* Make explicit what the last evaluation did (see fx_settle). */
static void settle(Off *o) {
    Ctx *c = o->c;
    for (int s = 0; s < c->S; s++)
        if (c->saved[s] == OFFLOAD && !o->away[s]) c->saved[s] = c->cand[s] ? DROP : KEEP;
    fx_settle(c);
}

/* Decisions that could take bytes away from the worst step. */
static void collect(Off *o, int worst, Moves *m) {
    Ctx *c = o->c;
    int kernel = worst >= 0 ? c->E[worst] : -1 - worst;
    m->n = 0;
    for (int i = c->wp[kernel]; i < c->wp[kernel + 1]; i++) o->across[c->wi[i]] = 0;
    for (int i = c->rp[kernel]; i < c->rp[kernel + 1]; i++) o->across[c->ri[i]] = 0;
    fx_touches_before(c, worst);
    for (int s = 0; s < c->S; s++) {
        if (!o->across[s] || c->prod[s] < 0 || c->prod[s] >= c->nf || !(c->cand[s] || o->can[s])) continue;
        int touched = c->last[s] >= 0 && !fx_has_drop(c, c->last[s], s);
        if (!c->avail[s] && c->saved[s] != DROP && c->cand[s]) push(m, s, DROP, NO_DROP, 0);
        if (c->saved[s] != OFFLOAD && o->can[s] && c->last[s] < 0) push(m, s, OFFLOAD, NO_DROP, 0);
        if (c->saved[s] != OFFLOAD && o->can[s] && touched) push(m, s, OFFLOAD, c->last[s], 1);
        if (touched && (c->cand[s] || c->saved[s] == OFFLOAD)) push(m, s, -1, c->last[s], 1);
    }
    if (worst < 0) return;
    int a, z;
    fx_segment(c, worst, &a, &z);
    for (int t = a; t <= z; t++)
        for (int i = c->wp[c->E[t]]; c->E[t] < c->nf && i < c->wp[c->E[t] + 1]; i++) {
            int s = c->wi[i];
            if (c->saved[s] == DROP && c->cand[s]) push(m, s, KEEP, NO_DROP, 0);
            if (c->saved[s] == DROP && o->can[s]) push(m, s, OFFLOAD, NO_DROP, 0);
            if (c->cand[s] && c->last[s] >= 0 && fx_has_drop(c, c->last[s], s)) push(m, s, -1, c->last[s], 0);
        }
}

/* What is known of a kind of decision about a storage: its last ratio of seconds to bytes. */
typedef struct { double *ratio; int n; } Guess;

static double *guess(const Guess *g, Decision d) {
    int kind = d.b == NO_DROP ? d.to : d.to >= 0 ? 3 : d.add ? 4 : 5;
    return g->ratio + (size_t)kind * (size_t)g->n + d.s;
}

static Guess new_guess(Off *o) {
    Ctx *c = o->c;
    Guess g = {calloc(6 * ((size_t)c->S + 1), sizeof(double)), c->S};
    for (int s = 0; s < c->S; s++) {
        double bytes = ((double)c->nb[s] + 1.0) * (c->N - c->nf + 1);
        double again = c->prod[s] < 0 ? 1.0 : (c->sec[c->prod[s]] + 1e-9 * c->total) / bytes;
        double away = 0.1 * (o->out_s[s] + o->in_s[s]) / bytes;
        g.ratio[DROP * c->S + s] = g.ratio[4 * c->S + s] = again;
        g.ratio[OFFLOAD * c->S + s] = g.ratio[3 * c->S + s] = away;
    }
    return g;
}

static int by_ratio(const void *a, const void *b) {
    double x = ((const Move *)a)->ratio, y = ((const Move *)b)->ratio;
    return (x > y) - (x < y);
}

static void rate(Off *o, Move *m, Joint now, int64_t room) {
    Ctx *c = o->c;
    Undo u = apply(c, m->d);
    o->limit_over = now.over - 0.5;
    Joint e = fx_off_eval(o, room);
    o->limit_over = HUGE_VAL;
    undo(c, m->d, u);
    double over = now.over - e.over;
    m->extra = e.extra - now.extra;
    m->ratio = over <= 0.5 ? HUGE_VAL : (m->extra + 1e-9 * c->total) / over;
    if (m->ratio < 0) m->ratio = -1.0 / (1e-30 - m->ratio);
}

/* Lazily find the best move: remembered ratios order the look, at most `look` looks beyond the best found so far. */
static int best_move(Off *o, Moves *m, Guess *g, Joint now, int64_t room, int look, double noise) {
    Ctx *c = o->c;
    for (int i = 0; i < m->n; i++) {
        m->at[i].ratio = *guess(g, m->at[i].d);
        if (noise > 0) m->at[i].ratio *= exp(noise * fx_normal(c));
    }
    fx_sort(m->at, m->n, sizeof(Move), by_ratio);
    int best = -1, left = look;
    for (int i = 0; i < m->n; i++) {
        double known = m->at[i].ratio;
        if (best >= 0 && (left <= 0 || known > 4.0 * fabs(m->at[best].ratio) + 1e-30)) break;
        left--;
        rate(o, m->at + i, now, room);
        *guess(g, m->at[i].d) = m->at[i].ratio == HUGE_VAL ? 1e3 * (fabs(known) + 1e-30) : m->at[i].ratio;
        if (m->at[i].ratio < HUGE_VAL && (best < 0 || m->at[i].ratio < m->at[best].ratio)) { best = i; left = look; }
    }
    return best;
}

/* Take the cheapest decision per byte of overflow until the peak fits. Returns 1 if it does. */
int fx_off_greedy(Off *o, int64_t room, int look, int rounds, double noise, int64_t deadline, Joint *out) {
    Ctx *c = o->c;
    Guess g = new_guess(o);
    Moves m = {0, 0, 0};
    Joint e = fx_off_eval(o, room);
    settle(o);
    while (e.peak > room && rounds-- > 0 && e.over < HUGE_VAL && !fx_is_late(c, deadline)) {
        collect(o, e.worst, &m);
        int i = best_move(o, &m, &g, e, room, look, noise);
        if (i < 0) break;
        apply(c, m.at[i].d);
        e = fx_off_eval(o, room);
        settle(o);
    }
    free(g.ratio); free(m.at);
    *out = fx_off_eval(o, room);
    return out->peak <= room;
}

static int is_better(const Ctx *c, Joint a, Joint b) {
    double eps = 1e-10 * c->total;
    return a.extra < b.extra - eps || (a.extra <= b.extra && a.moved < b.moved - 0.5);
}

static void decisions(Off *o, Moves *m) {
    Ctx *c = o->c;
    m->n = 0;
    for (int s = 0; s < c->S; s++) {
        if (c->prod[s] < 0 || c->prod[s] >= c->nf || !(c->cand[s] || o->can[s])) continue;
        for (int to = KEEP; to >= 0; to = to == KEEP ? OFFLOAD : to == OFFLOAD ? DROP : -1)
            if (c->saved[s] != to && (to == KEEP || (to == DROP ? c->cand[s] : o->can[s]))) push(m, s, to, NO_DROP, 0);
    }
    for (int b = c->nf; b < c->N; b++)
        for (int i = c->head[b]; i >= 0; i = c->next[i]) push(m, c->val[i], -1, b, 0);
    for (int i = 0; i < m->n; i++) {
        Decision d = m->at[i].d;
        double spared = c->saved[d.s] == DROP || d.b != NO_DROP ? c->sec[c->prod[d.s]] : 0.5 * o->in_s[d.s];
        m->at[i].ratio = (d.to == KEEP || d.b != NO_DROP ? -2.0 : d.to == OFFLOAD ? -1.0 : -0.5) * spared;
    }
}

/* Single decisions, most promising first, each looked at with probability `share`, taken if time falls (or bytes moved,
 * at equal time) and the peak fits. */
static Joint polish(Off *o, int64_t room, int passes, double share, int64_t deadline) {
    Ctx *c = o->c;
    Moves m = {0, 0, 0};
    Joint e = fx_off_eval(o, room);
    settle(o);
    o->must_fit = 1;
    for (int gain = 1; gain && passes-- > 0 && e.peak <= room;) {
        double before = e.extra;
        decisions(o, &m);
        fx_sort(m.at, m.n, sizeof(Move), by_ratio);
        for (int i = 0; i < m.n; i++) {
            if ((i & 15) == 0 && fx_is_late(c, deadline)) { passes = 0; break; }
            if (share < 1.0 && fx_uniform(c) > share) continue;
            Undo u = apply(c, m.at[i].d);
            o->limit_s = e.extra;
            Joint f = fx_off_eval(o, room);
            if (f.peak <= room && is_better(c, f, e)) { e = f; settle(o); }
            else undo(c, m.at[i].d, u);
        }
        gain = e.extra < before - 1e-7 * c->total;
    }
    free(m.at);
    o->must_fit = 0;
    o->limit_s = HUGE_VAL;
    return fx_off_eval(o, room);
}

void fx_off_polish(Off *o, int64_t room, int passes, int64_t deadline, Joint *out) {
    *out = polish(o, room, passes, 1.0, deadline);
}

/* A random decision: about a storage read near a random step, or one of the drops there are. */
static Decision random_decision(Off *o, const Moves *m) {
    Ctx *c = o->c;
    for (int tries = 0; tries < 50; tries++) {
        double u = fx_uniform(c);
        if (u < 0.35 && m->n) return m->at[(int)(fx_uniform(c) * m->n)].d;
        int t = (int)(fx_uniform(c) * c->num_steps), k = c->E[t], n = c->rp[k + 1] - c->rp[k];
        if (!n) continue;
        int s = c->ri[c->rp[k] + (int)(fx_uniform(c) * n)];
        if (c->prod[s] < 0 || c->prod[s] >= c->nf || !(c->cand[s] || o->can[s])) continue;
        if (u > 0.8 && (c->cand[s] || c->saved[s] == OFFLOAD))
            return (Decision){s, -1, c->seg[t], !fx_has_drop(c, c->seg[t], s)};
        int to = (c->saved[s] + 1 + (int)(fx_uniform(c) * 2)) % 3;
        if (to == KEEP || (to == DROP ? c->cand[s] : o->can[s])) return (Decision){s, to, NO_DROP, 0};
    }
    return (Decision){0, -1, NO_DROP, 0};
}

/* Keep everything that some stretch of forward makes, and forget its drops. */
static void ruin(Off *o) {
    Ctx *c = o->c;
    int width = 1 + (int)(fx_uniform(c) * fx_uniform(c) * 0.4 * c->nf), from = (int)(fx_uniform(c) * c->nf) - width / 2;
    for (int s = 0; s < c->S; s++)
        if (c->prod[s] >= from && c->prod[s] < from + width && c->prod[s] >= 0 && c->prod[s] < c->nf && (c->cand[s] || o->can[s]))
            c->saved[s] = KEEP;
    for (int b = c->nf; b < c->N; b++)
        for (int i = c->head[b], after; i >= 0; i = after) {
            int s = c->val[i];
            after = c->next[i];
            if (c->prod[s] >= from && c->prod[s] < from + width) fx_apply(c, (Toggle){T_REMOVE, s, b});
        }
}

/* Rounds of: a few random decisions or a stretch undone, greedy repair with noise, polish; ends in the best state seen. */
int fx_off_perturb(Off *o, int64_t room, int rounds, int strength, double temperature, int64_t deadline, Joint *out) {
    Ctx *c = o->c;
    Snapshot best = fx_snap_new(c), now = fx_snap_new(c);
    Moves m = {0, 0, 0};
    Joint e = fx_off_eval(o, room), top = e;
    int done = 0;
    settle(o);
    fx_snap_take(c, &best); fx_snap_take(c, &now);
    for (; done < rounds && *c->work < deadline; done++) {
        Joint f;
        decisions(o, &m);
        fx_off_eval(o, room);
        if (fx_uniform(c) < 0.5) ruin(o);
        else for (int n = 1 + (int)(fx_uniform(c) * strength); n > 0; n--) apply(c, random_decision(o, &m));
        int ok = fx_off_greedy(o, room, 2, 100, 0.3, deadline, &f);
        if (ok && f.extra < e.extra + 0.01 * c->total) f = polish(o, room, 1, 0.3, deadline);
        double limit = e.extra - temperature * c->total * log(fx_uniform(c) + 1e-300);
        if (!ok || f.extra > limit) { fx_snap_put(c, &now); continue; }
        e = f;
        fx_snap_take(c, &now);
        if (is_better(c, f, top)) { top = f; fx_snap_take(c, &best); }
    }
    fx_snap_put(c, &best);
    *out = fx_off_eval(o, room);
    fx_snap_free(&best); fx_snap_free(&now); free(m.at);
    return done;
}
