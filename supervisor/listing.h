/* Directory listings of any size.
 *
 * Guarantee: a listing is sent in pieces as fast as they leave, so memory stays bounded whatever
 * the directory holds, and it keeps no descriptor across a detach. */
#ifndef SOJOURN_LISTING_H
#define SOJOURN_LISTING_H

#include "connection.h"

void listing_start(struct request *request);
void listing_cancel(uint64_t id);
void listing_drop(void);
bool listing_serve(void); /* sends further pieces; true while more could be sent at once */

#endif
