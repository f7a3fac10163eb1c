/* Whether connections of the session leave it, and how.
 *
 * Guarantee: while the network is off nothing listens and every address but the loopback's refuses
 * at once. A restore is noticed by itself, before the node is there: what was under way is reset
 * then, so that no program waits for a peer that is gone. */
#ifndef SOJOURN_NETWORK_H
#define SOJOURN_NETWORK_H

#include "connection.h"

/* `own`: the network stack is the session's own and its tables may be set. */
void network_open(const char *socket_path, bool own);
uint32_t network_features(void);
void network_switch(struct request *request);
/* Puts right what a restore has undone; costs little when there was none. */
void network_woken(void);

#endif
