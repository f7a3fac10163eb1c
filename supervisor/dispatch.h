/* Which part answers which request.
 *
 * Guarantee: one table; what mutates is marked here and nowhere else. */
#ifndef SOJOURN_DISPATCH_H
#define SOJOURN_DISPATCH_H

#include "connection.h"

/* Whether a repeated request must be answered from the record of the first. */
bool op_mutates(uint16_t op);
/* Answers or parks the request; false when its body is malformed. */
bool dispatch(struct request *request);
/* The node has the answer `id`. */
void dispatch_acknowledged(uint64_t id);
/* The connection is gone: forget what waits for an answer (the node asks again). */
void dispatch_parked_drop(void);
/* Another node process has attached: end what belonged to the former. */
void dispatch_new_client(void);

#endif
