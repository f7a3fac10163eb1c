/* Requests about a process that wait for their answer.
 *
 * Guarantee: they hold nothing but their own few numbers and at most one piece of input, and are
 * dropped with the connection: the node asks again, and the record answers. */
#ifndef SOJOURN_PARKED_H
#define SOJOURN_PARKED_H

#include "process.h"

struct parked {
    struct parked *next;
    uint64_t id;
    uint16_t op;
    uint64_t out, err; /* OP_OUTPUT: offsets asked for */
    uint32_t most;
    struct bytes data; /* OP_WRITE: input that does not fit yet */
};

struct parked *parked_add(struct process *process, const struct request *request, uint64_t out,
                          uint64_t err, uint32_t most);
bool parked_writes(const struct process *process);
void parked_drop(struct process *process);
void parked_serve(struct process *process);

#endif
