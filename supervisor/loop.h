/* The event loop: one thread, one epoll set, one clock.
 *
 * Guarantee: nothing here blocks on a peer; timers are asked for each turn, so there is no timer
 * state that a freeze and restore could lose. An event reaches only who is watched for it, whatever
 * a restored kernel reports. */
#ifndef SOJOURN_LOOP_H
#define SOJOURN_LOOP_H

#include <stdbool.h>
#include <stdint.h>

struct source {
    int fd; /* -1: not open */
    bool watched;
    uint32_t events, place; /* as watched */
    void (*ready)(struct source *source, uint32_t events);
};

void loop_open(void);
void loop_watch(struct source *source, uint32_t events);
void loop_unwatch(struct source *source);
void loop_close(struct source *source);
/* Has the kernel begin anew with what it watches: nothing of what was removed is left in it then. */
void loop_renew(void);
/* Waits at most until `deadline` (monotonic ns) and calls what is ready. */
void loop_turn(uint64_t deadline);

uint64_t now_ns(void);      /* CLOCK_MONOTONIC */
uint64_t wall_clock(void);  /* CLOCK_REALTIME */

#define NEVER UINT64_MAX
#define MS 1000000ull
#define SECOND 1000000000ull

#endif
