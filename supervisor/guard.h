/* The guard against fork storms.
 *
 * Guarantee: when more than the allowed number of processes live, the session of processes that
 * holds most of them is killed and its record says why; the supervisor itself goes on answering. */
#ifndef SOJOURN_GUARD_H
#define SOJOURN_GUARD_H

#include <stdint.h>

void guard_limit(unsigned most);
void guard_started(void);            /* a command was started: look again soon */
void guard_reaped(unsigned count);   /* a burst of ends hints at a storm */
uint64_t guard_timers(uint64_t now); /* looks when due, returns when to look again */
unsigned guard_count(void);          /* live processes besides the supervisor */

#endif
