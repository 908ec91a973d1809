/* Exact evaluation of a three-way state. Backward is emitted with just-in-time recompute; working sets come from one
 * reverse liveness pass in which an offloaded storage counts from its producer to its last forward use and during each
 * of its visits in backward; then transfers are placed in the bytes that are left, and three clocks give the makespan. */
#include "_offload.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

Off *fx_off_new(Ctx *c, const uint8_t *can, const double *out_s, const double *in_s) {
    Off *o = calloc(1, sizeof(Off));
    size_t s = (size_t)c->S + 1, x = (size_t)(c->cap_steps + c->nf) + 1;
    uint8_t *flags = calloc(6 * s, 1);
    o->c = c;
    o->limit_s = o->limit_over = HUGE_VAL;
    o->can = flags; o->remade = flags + s; o->away = flags + 2 * s; o->tail = flags + 3 * s;
    o->across = flags + 4 * s; o->uncopied = flags + 5 * s;
    memcpy(flags, can, (size_t)c->S);
    o->out_s = calloc(4 * s, sizeof(double)); o->in_s = o->out_s + s;
    o->out_end = o->out_s + 2 * s; o->in_end = o->out_s + 3 * s;
    memcpy(o->out_s, out_s, sizeof(double) * (size_t)c->S);
    memcpy(o->in_s, in_s, sizeof(double) * (size_t)c->S);
    o->open = malloc(sizeof(int) * s); o->last_fw = malloc(sizeof(int) * s); o->queue = malloc(sizeof(int) * s);
    o->current = malloc(sizeof(int) * s);
    o->run = malloc(sizeof(int) * ((size_t)c->nf + 1));
    o->W = malloc(sizeof(int64_t) * x); o->charge = malloc(sizeof(int64_t) * x);
    o->cap_visits = c->cap_steps;
    o->visit = malloc(sizeof(Visit) * (size_t)o->cap_visits);
    o->from = malloc(sizeof(int) * (size_t)o->cap_visits);
    o->cap_events = (int)x + 3 * o->cap_visits + (int)s;
    o->event = malloc(sizeof(Event) * (size_t)o->cap_events);
    return o;
}

void fx_off_free(Off *o) {
    void *p[] = {(void *)o->can, o->out_s, o->open, o->last_fw, o->queue, o->current, o->run, o->W, o->charge, o->visit, o->from,
                 o->event};
    for (size_t i = 0; i < sizeof p / sizeof *p; i++) free(p[i]);
    free(o);
}

/* Decisions as in fx_load, with OFFLOAD where that is possible. */
void fx_off_load(Off *o, const uint8_t *saved, int n, const int *b, const int *s) {
    Ctx *c = o->c;
    fx_clear(c);
    for (int i = 0; i < c->S; i++) {
        c->saved[i] = saved[i] == DROP && !c->cand[i] ? KEEP : saved[i];
        if (saved[i] == OFFLOAD && !o->can[i]) c->saved[i] = KEEP;
    }
    for (int i = 0; i < n; i++)
        if (c->cand[s[i]] || c->saved[s[i]] == OFFLOAD) fx_apply(c, (Toggle){T_ADD, s[i], b[i]});
}

static void note_visits(Off *o, int from) {
    Ctx *c = o->c;
    for (int t = from; t < c->num_steps; t++) {
        int k = c->E[t];
        for (int i = c->rp[k]; i < c->rp[k + 1]; i++) {
            int s = c->ri[i];
            if (c->saved[s] != OFFLOAD || o->remade[s] || c->prod[s] >= c->nf) continue;
            if (o->open[s] < 0 && o->num_visits < o->cap_visits) {
                o->open[s] = o->num_visits++;
                o->visit[o->open[s]] = (Visit){s, t, t, 0, 0};
                o->away[s] = 1;
            }
            o->visit[o->open[s]].last = t;
        }
        for (int i = c->wp[k]; k < c->nf && i < c->wp[k + 1]; i++) { o->remade[c->wi[i]] = 1; o->open[c->wi[i]] = -1; }
    }
}

static int emit(Off *o) {
    Ctx *c = o->c;
    for (int s = 0; s < c->S; s++) {
        c->avail[s] = (uint8_t)(c->saved[s] != DROP && c->prod[s] < c->nf);
        o->open[s] = -1;
    }
    memset(o->remade, 0, (size_t)c->S);
    memset(o->away, 0, (size_t)c->S);
    c->num_steps = o->num_visits = 0;
    for (int b = c->nf; b < c->N; b++) {
        int from = c->num_steps;
        if (!fx_emit_missing(c, b, b)) return 0;
        note_visits(o, from);
        for (int i = c->head[b]; i >= 0; i = c->next[i]) {
            int s = c->val[i];
            if (c->saved[s] == OFFLOAD && !o->remade[s]) o->open[s] = -1;
            else c->avail[s] = !c->cand[s];
        }
        for (int i = c->aptr[b]; i < c->aptr[b + 1]; i++)
            if (c->saved[c->aval[i]] == DROP) c->avail[c->aval[i]] = 0;
    }
    return 1;
}

static void note(Off *o, Joint *e, int64_t bytes, int step) {
    if (bytes <= e->peak) return;
    e->peak = bytes;
    e->worst = step;
    memcpy(o->across, o->c->need, (size_t)o->c->S);
}

/* Working sets of backward, last step first; c->need and the return value are what stands before it. */
static int64_t back_over_backward(Off *o, int64_t room, Joint *e) {
    Ctx *c = o->c;
    int64_t alive = c->keep_bytes, worst = 0;
    int j = o->num_visits - 1;
    memcpy(c->need, c->keep, (size_t)c->S);
    for (int t = c->num_steps - 1; t >= 0; t--) {
        int k = c->E[t], redo = k < c->nf;
        if (redo) e->extra += c->sec[k];
        int64_t m = c->mem[t] = fx_step_back(c, k, redo, &alive);
        if (m > worst) worst = m;
        note(o, e, m, t);
        for (; j >= 0 && o->visit[j].first == t; j--) {
            int s = o->visit[j].s;
            if (c->need[s]) { c->need[s] = 0; alive -= c->nb[s]; }
        }
        if (t == 0 || c->seg[t - 1] != c->seg[t]) {
            if (worst > room) e->over += (double)(worst - room);
            worst = 0;
        }
    }
    memcpy(c->used, c->need, (size_t)c->S);
    return alive;
}

static void back_over_forward(Off *o, int64_t room, int64_t alive, Joint *e) {
    Ctx *c = o->c;
    int n = 0;
    for (int k = c->nf - 1; k >= 0; k--) {
        int run = c->rec[k] != 1;
        for (int i = c->wp[k]; i < c->wp[k + 1]; i++) run |= c->need[c->wi[i]] | o->away[c->wi[i]];
        c->run[k] = (uint8_t)run;
        c->fwmem[k] = 0;
        if (!run) { e->extra -= c->sec[k]; continue; }
        n++;
        int64_t m = c->fwmem[k] = fx_step_back(c, k, 0, &alive);
        if (m > room) e->over += (double)(m - room);
        note(o, e, m, -1 - k);
    }
    o->num_run = n;
    o->num_queue = 0;
    for (int k = 0, x = 0; k < c->nf; k++) {
        if (!c->run[k]) continue;
        o->run[x] = k;
        o->W[x] = c->fwmem[k];
        for (int i = c->rp[k]; i < c->rp[k + 1]; i++) if (o->away[c->ri[i]]) o->last_fw[c->ri[i]] = x;
        for (int i = c->wp[k]; i < c->wp[k + 1]; i++)
            if (o->away[c->wi[i]]) { o->last_fw[c->wi[i]] = x; o->queue[o->num_queue++] = c->wi[i]; }
        x++;
    }
}

/* Where each reload could be issued at the earliest: scan back from its first use while the bytes fit. */
static void place(Off *o, int64_t room) {
    Ctx *c = o->c;
    int F = o->num_run, X = F + c->num_steps, before = 0;
    memcpy(o->W + F, c->mem, sizeof(int64_t) * (size_t)c->num_steps);
    memset(o->charge, 0, sizeof(int64_t) * (size_t)X);
    for (int s = 0; s < c->S; s++) o->open[s] = -1;   /* from here on: end of the previous visit */
    for (int j = 0; j < o->num_visits; j++) {
        Visit *v = o->visit + j;
        int at = F + v->first, low = o->open[v->s] < 0 ? o->last_fw[v->s] + 1 : o->open[v->s] + 1;
        if (low < before) low = before;
        while (at > low && room - o->W[at - 1] - o->charge[at - 1] >= c->nb[v->s]) o->charge[--at] += c->nb[v->s];
        o->from[j] = before = at;
        o->open[v->s] = F + v->last;
        v->resident = 0;
        v->charge = 0;
    }
}

typedef struct { Off *o; int64_t room, tails, ahead; double now, out, in; int oldest, q; } Sweep;

static void event(Off *o, int kind, int what) {
    if (o->num_events < o->cap_events) o->event[o->num_events++] = (Event){kind, what};
}

static int oldest_tail(Sweep *w) {
    Off *o = w->o;
    while (w->oldest < o->num_queue && o->uncopied[o->queue[w->oldest]]) w->oldest++;
    for (int i = w->oldest; i < o->num_queue; i++) if (o->tail[o->queue[i]]) return o->queue[i];
    return -1;
}

static void give_back(Sweep *w, int s) {
    Off *o = w->o;
    event(o, FREE, s);
    o->tail[s] = 0;
    o->uncopied[s] = 1;   /* for oldest_tail: no longer a candidate */
    w->tails -= o->c->nb[s];
    if (o->out_end[s] > w->now) w->now = o->out_end[s];
}

/* Give back the oldest copies until `bytes` fit; without waiting if `idle`. */
static void make_room(Sweep *w, int64_t bytes, int idle) {
    while (w->tails > 0 && bytes + w->ahead + w->tails > w->room) {
        int s = oldest_tail(w);
        if (s < 0 || (idle && w->o->out_end[s] > w->now)) return;
        give_back(w, s);
    }
}

/* Issue the reloads whose place is step x or before; the next one waits while it would force a wait for a copy out. */
static void issue(Sweep *w, int x) {
    Off *o = w->o;
    for (; w->q < o->num_visits && o->from[w->q] <= x; w->q++) {
        Visit *v = o->visit + w->q;
        int due = o->num_run + v->first == x, s = v->s;
        int64_t size = o->c->nb[s];
        if (o->tail[s]) {
            o->tail[s] = 0;
            w->tails -= size;
            v->resident = 1;
        } else {
            make_room(w, o->W[x] + (due ? 0 : size), 1);
            if (!due && w->tails > 0 && o->W[x] + size + w->ahead + w->tails > w->room) return;
            event(o, RELOAD, s);
            double start = w->now > w->in ? w->now : w->in;
            if (o->out_end[s] > start) start = o->out_end[s];
            w->in = o->in_end[s] = start + o->in_s[s];
        }
        v->charge = due ? 0 : size;
        w->ahead += v->charge;
    }
}

static void produced(Sweep *w, int k, int x) {
    Off *o = w->o;
    Ctx *c = o->c;
    for (int i = c->wp[k]; i < c->wp[k + 1]; i++) {
        int s = c->wi[i];
        if (!o->away[s]) continue;
        event(o, COPY, s);
        w->out = (w->now > w->out ? w->now : w->out) + o->out_s[s];
        o->out_end[s] = w->out;
        if (o->last_fw[s] == x) { o->tail[s] = 1; w->tails += c->nb[s]; }
    }
    for (int i = c->rp[k]; i < c->rp[k + 1]; i++) {
        int s = c->ri[i];
        if (o->away[s] && o->last_fw[s] == x) { o->tail[s] = 1; w->tails += c->nb[s]; }
    }
}

/* After a visit that needed no reload but has a successor: the bytes go now. o->open is the end of the last visit. */
static void close_visits(Sweep *w, int k, int x) {
    Off *o = w->o;
    Ctx *c = o->c;
    for (int i = c->rp[k]; i < c->rp[k + 1]; i++) {
        int s = c->ri[i];
        if (!o->away[s] || o->open[s] == x || o->current[s] < 0) continue;
        const Visit *v = o->visit + o->current[s];
        if (!v->resident || o->num_run + v->last != x) continue;
        event(o, FREE, s);
        o->uncopied[s] = 1;
        if (o->out_end[s] > w->now) w->now = o->out_end[s];
    }
}

/* Place frees, reloads and waits among the steps. Marks in `uncopied` what never had to leave. */
static void sweep(Off *o, int64_t room) {
    Ctx *c = o->c;
    Sweep w = {o, room, 0, 0, 0.0, 0.0, 0.0, 0, 0};
    int F = o->num_run, X = F + c->num_steps, first = 0;
    memset(o->tail, 0, (size_t)c->S);
    memset(o->uncopied, 0, (size_t)c->S);
    for (int s = 0; s < c->S; s++) o->current[s] = -1;
    o->num_events = 0;
    for (int x = 0; x < X; x++) {
        int k = x < F ? o->run[x] : c->E[x - F];
        make_room(&w, o->W[x], 0);
        issue(&w, x);
        for (; first < o->num_visits && F + o->visit[first].first == x; first++) {
            Visit *v = o->visit + first;
            w.ahead -= v->charge;
            o->current[v->s] = first;
            if (v->resident) continue;
            event(o, WAIT, v->s);
            if (o->in_end[v->s] > w.now) w.now = o->in_end[v->s];
        }
        event(o, RUN, k);
        w.now += c->sec[k];
        if (x < F) { produced(&w, k, x); continue; }
        close_visits(&w, k, x);
    }
    for (int i = 0; i < o->num_queue; i++) o->uncopied[o->queue[i]] ^= 1;   /* freed somewhere: copied */
}

/* Play the events without the copies that turned out needless. */
static double play(Off *o, double *moved) {
    double now = 0.0, out = 0.0, in = 0.0;
    int n = 0;
    for (int i = 0; i < o->num_events; i++) {
        Event e = o->event[i];
        int s = e.what;
        if (e.kind == COPY && o->uncopied[s]) continue;
        o->event[n++] = e;
        if (e.kind == RUN) now += o->c->sec[s];
        else if (e.kind == COPY) { out = o->out_end[s] = (now > out ? now : out) + o->out_s[s]; *moved += (double)o->c->nb[s]; }
        else if (e.kind == FREE) { if (o->out_end[s] > now) now = o->out_end[s]; }
        else if (e.kind == RELOAD) {
            double ready = now > o->out_end[s] ? now : o->out_end[s];
            in = o->in_end[s] = (ready > in ? ready : in) + o->in_s[s];
            *moved += (double)o->c->nb[s];
        } else if (o->in_end[s] > now) now = o->in_end[s];
    }
    o->num_events = n;
    if (out > now) now = out;
    return in > now ? in : now;
}

Joint fx_off_eval(Off *o, int64_t room) {
    Ctx *c = o->c;
    Joint e = {0.0, -1, 0.0, 0, 0.0};
    if (!emit(o)) {
        *c->work += c->num_steps + VISITS_PER_EVAL;
        return (Joint){HUGE_VAL, INT64_MAX, HUGE_VAL, 0, 0.0};
    }
    back_over_forward(o, room, back_over_backward(o, room, &e), &e);
    *c->work += c->num_steps + c->nf + VISITS_PER_EVAL;
    if ((o->must_fit && e.peak > room) || e.extra > o->limit_s || e.over > o->limit_over) return e;
    if (o->num_visits) {
        *c->work += c->num_steps + c->nf + VISITS_PER_EVAL;
        place(o, room);
        sweep(o, room);
        e.extra = play(o, &e.moved) - c->total;
    }
    return e;
}

void fx_off_evaluate(Off *o, int64_t room, Joint *out) { *out = fx_off_eval(o, room); }
int fx_off_num_events(const Off *o) { return o->num_visits ? o->num_events : o->num_run + o->c->num_steps; }

/* Read back the last evaluation: events in order; returns how many kernels forward runs. */
int fx_off_events(const Off *o, int *kind, int *what) {
    if (o->num_visits)
        for (int i = 0; i < o->num_events; i++) { kind[i] = o->event[i].kind; what[i] = o->event[i].what; }
    else
        for (int i = 0; i < o->num_run + o->c->num_steps; i++) {
            kind[i] = RUN;
            what[i] = i < o->num_run ? o->run[i] : o->c->E[i - o->num_run];
        }
    return o->num_run;
}
