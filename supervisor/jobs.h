/* Long file work, each piece in a process of its own.
 *
 * Guarantee: the supervisor answers others meanwhile, and a job's answer is recorded even when the
 * connection was lost, so that a repeated request finds it instead of doing the work twice. */
#ifndef SOJOURN_JOBS_H
#define SOJOURN_JOBS_H

#include "connection.h"

/* Runs work(first, second) elsewhere and answers with the errno it returns. */
void jobs_start(const struct request *request, const char *first, const char *second,
                int (*work)(const char *first, const char *second));
bool jobs_running(uint64_t id);
void jobs_disown(void); /* nobody waits for the answers any more */

#endif
