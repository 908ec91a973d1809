/* Keep, recompute or offload: evaluation of three-way states on a compute stream and one link, and search over them. */
#ifndef FXMEM_OFFLOAD_H
#define FXMEM_OFFLOAD_H
#include "_kernel.h"

enum { RUN = 0, COPY = 1, FREE = 2, RELOAD = 3, WAIT = 4 };

/* One stay of an offloaded storage in backward: from its first to its last read there (backward steps). */
typedef struct { int s, first, last, resident; int64_t charge; } Visit;

typedef struct { int kind, what; } Event;   /* what: a kernel (RUN) or a storage */

typedef struct {
    double extra;   /* seconds above running every kernel once, waits included */
    int64_t peak;
    double over;
    int worst;      /* as in Eval */
    double moved;   /* bytes copied, both directions */
} Joint;

typedef struct {
    Ctx *c;
    const uint8_t *can;                  /* may be offloaded */
    double *out_s, *in_s;                /* seconds of a copy, by storage */
    int *open;                           /* newest visit of a storage, -1 */
    uint8_t *remade, *away, *tail;       /* recomputed in backward; has visits; on the device past its last forward use */
    uint8_t *across;                     /* alive at the worst step, which does not touch them */
    int *run, num_run, *last_fw;         /* forward kernels that run; position of the last forward use */
    int64_t *W, *charge;                 /* bytes by step: working sets, reloads ahead of their use */
    Visit *visit; int num_visits, cap_visits, *from;
    int *current;                        /* visit under way, by storage */
    int *queue, num_queue;               /* storages in the order of their copies out */
    double *out_end, *in_end;
    uint8_t *uncopied;
    Event *event; int num_events, cap_events;
    /* an evaluation that could not be accepted ends before transfers are placed (HUGE_VAL, 0: never) */
    double limit_s, limit_over;
    int must_fit;
} Off;

Joint fx_off_eval(Off *o, int64_t room);
#endif
