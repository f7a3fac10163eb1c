/* One tunnel: what tunnels.c, which begins and parks them, and tunnel_stream.c, which moves their
 * bytes, have in common. */
#ifndef SOJOURN_TUNNEL_H
#define SOJOURN_TUNNEL_H

#include "loop.h"
#include "tunnels.h"

enum tunnel_state {
    DIALING, /* the connection inside is being made */
    WAITING, /* for the node and the gateway */
    OPENING, /* OPEN or RESUME is sent */
    OPEN,
    PARKING, /* DETACH is sent */
    PARKED,
    CLOSING, /* what has come is still passed on */
};

struct tunnel {
    struct source guest, link;
    struct tunnel *next, **self;
    enum tunnel_state state;
    enum tunnel_kind kind;
    bool known;  /* the gateway has it: another connection begins with RESUME */
    bool stands; /* OPENED has come on this connection */
    uint64_t id;
    uint64_t try_at, give_up; /* WAITING, DIALING */
    uint64_t dial, client;    /* the request that waits for an answer, and whose it is */
    uint64_t sent, received;  /* data: framed for the gateway, taken from it */
    struct bytes out;         /* at most one frame of data or an end, and what parks it */
    size_t out_at;
    struct bytes kept; /* that frame, over a freeze */
    struct bytes in, down;
    size_t down_at;
    bool guest_ended, end_received, down_ended;
    struct sockaddr_in server, from; /* a redirected connection */
    uint16_t port, host_length;
    bool tried_ipv6;
    char host[NAME_SIZE];
};

/* Events of both ends; and what follows from whatever happened: more is waited for, or its end. */
void tunnel_guest_ready(struct source *source, uint32_t events);
void tunnel_link_ready(struct source *source, uint32_t events);
void tunnel_settle(struct tunnel *t);

void tunnel_queue(struct tunnel *t, enum tunnel_frame type, const void *body, size_t length);
bool tunnel_flush(struct tunnel *t); /* false: the connection is broken */
void tunnel_park(struct tunnel *t);
void tunnel_reset(struct tunnel *t, int error);
void tunnel_reset_at_close(int fd);

/* In tunnels.c: the next step of a connection inside that is being made; 0 or an errno. */
int tunnel_dialed(struct tunnel *t);
void tunnel_forget(struct tunnel *t);

#endif
