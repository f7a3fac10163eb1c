/* Watching directories for changes.
 *
 * Guarantee: events are numbered and kept, within a bound, until the reader has them; when some
 * were lost the reader is told by an overflow event and must list again. */
#ifndef SOJOURN_WATCH_H
#define SOJOURN_WATCH_H

#include "connection.h"

void watch_start(struct request *request);
void watch_read(struct request *request);
void watch_end(struct request *request);
void watch_cancel(uint64_t id);
void watch_parked_drop(void);
void watch_end_all(void);
void watch_serve(void);

#endif
