/* The guard against fork storms.
 *
 * Two bounds: gVisor refuses forks beyond RLIMIT_NPROC, also to root, to whom has neither
 * CAP_SYS_ADMIN nor CAP_SYS_RESOURCE (commands lose them); that holds at every instant, and without it a storm
 * can use up the host tasks of the sandbox, which ends it, between two looks. It is set somewhat
 * higher than the limit, so that a storm goes over the limit and is found and ended by the looks,
 * instead of idling for ever at the bound.
 *
 * Guarantee: when more than the allowed number of processes live, the session of processes that
 * holds most of them is killed and its record says why; the supervisor itself goes on answering. */
#ifndef SOJOURN_GUARD_H
#define SOJOURN_GUARD_H

#include <stdint.h>

void guard_limit(unsigned most);
/* RLIMIT_NPROC for commands; 0 where the kernel counts a user's processes beyond this sandbox. */
unsigned guard_kernel_limit(void);
void guard_started(void);            /* a command was started: look again soon */
void guard_reaped(unsigned count);   /* a burst of ends hints at a storm */
uint64_t guard_timers(uint64_t now); /* looks when due, returns when to look again */
unsigned guard_count(void);          /* live processes besides the supervisor */
unsigned guard_look(uint64_t *sum);  /* the same, and adds a hash of which ones they are */

#endif
