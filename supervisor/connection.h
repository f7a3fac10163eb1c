/* The one connection to the node.
 *
 * Guarantee: a mutating request takes effect once however often it is repeated: its answer is kept
 * until the node says it arrived. Nothing of the host stays open while there is no connection.
 * Whatever the peer sends, memory stays bounded and the worst that happens is a dropped connection. */
#ifndef SOJOURN_CONNECTION_H
#define SOJOURN_CONNECTION_H

#include "bytes.h"
#include "wire.h"

#include <stdbool.h>
#include <stdint.h>

struct request {
    uint64_t id;
    uint16_t op;
    struct reader body;
};

void connection_open(const char *socket_path);
/* When to be called again (monotonic ns) and the call that connects, flushes and lists. */
uint64_t connection_deadline(void);
void connection_serve(uint64_t now);

/* An answer is built in one shared buffer: begin, put_..., end. */
struct bytes *answer_begin(uint64_t id, uint16_t op);
void answer_end(void);                     /* status 0 */
void answer_end_more(void);                /* status 0, further frames follow */
void answer_error(uint64_t id, uint16_t op, int error, enum stage stage, const char *about);
void answer_result(uint64_t id, uint16_t op, int error, const char *about); /* 0: empty success */

bool connection_up(void);
/* Whether much is waiting to be sent: producers of long answers pause. */
bool connection_full(void);
/* Counts the node clients seen; what belongs to an earlier one is nobody's. */
uint64_t connection_client(void);

#endif
