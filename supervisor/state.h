/* What the node asks about the sandbox as a whole.
 *
 * Guarantee: looking is bounded in time and changes nothing inside. */
#ifndef SOJOURN_STATE_H
#define SOJOURN_STATE_H

#include "connection.h"

void state_open(void);
void state_put_hello(struct bytes *to);
void state_info(struct request *request);
void state_activity(struct request *request);
void state_unlinked(struct request *request);
void state_sync(struct request *request);
void state_refresh(struct request *request);

#endif
