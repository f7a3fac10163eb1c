/* Writing files.
 *
 * Guarantee: a file is replaced whole or not at all, and keeps the mode and owner of the one it
 * replaces; bytes sent twice are written once. Between two pieces nothing is held open. */
#ifndef SOJOURN_UPLOADS_H
#define SOJOURN_UPLOADS_H

#include "connection.h"

void uploads_whole(struct request *request);
void uploads_begin(struct request *request);
void uploads_data(struct request *request);
void uploads_end(struct request *request);
void uploads_abort(struct request *request);
void uploads_abort_all(void);

#endif
