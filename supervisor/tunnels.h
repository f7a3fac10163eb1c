/* Connections of the session that go through the gateway.
 *
 * Guarantee: bytes arrive whole and in order, or the connection is reset; what is held of each
 * connection is bounded, and so is their number. While the node is away nothing of the host is
 * open: a parked tunnel goes on where it was, or is reset when the gateway no longer knows it. */
#ifndef SOJOURN_TUNNELS_H
#define SOJOURN_TUNNELS_H

#include "connection.h"
#include "names.h"

#define MOST_TUNNELS 1024
#define TOKEN_SIZE 16

enum tunnel_kind { TUNNEL_CONNECT = 1, TUNNEL_INBOUND = 2, TUNNEL_PROXY = 3 };

/* Frames; docs/formats/tunnels.md. */
enum tunnel_frame {
    TUNNEL_OPEN = 1,
    TUNNEL_RESUME = 2,
    TUNNEL_OPENED = 3,
    TUNNEL_REFUSED = 4,
    TUNNEL_DATA = 5,
    TUNNEL_END = 6,
    TUNNEL_RESET = 7,
    TUNNEL_DETACH = 8,
};

struct tunnel_header {
    uint32_t length; /* of the body */
    uint8_t type, zero[3];
} __attribute__((packed));

void tunnels_open(const char *socket_path);
/* Takes over an accepted connection. `server` is what a redirected one was meant for, else NULL. */
void tunnels_accepted(int fd, const struct sockaddr_in *server);
/* Resets a connection that is to have no tunnel. */
void tunnels_refuse(int fd);
/* Answers the request when the tunnel is opened or cannot be. */
void tunnels_dial(struct request *request);
bool tunnels_dialing(uint64_t id);

/* Has every tunnel let go of the gateway; until `tunnels_attached` none is opened. */
void tunnels_park(void);
bool tunnels_parked(void);
/* Resets those that did not let go; none is open afterwards. */
void tunnels_park_end(void);
/* The node is there (again): parked tunnels go on. */
void tunnels_attached(void);
/* Ends all that left the session; with `inbound` the others too. `poke` after a restore. */
void tunnels_reset(bool inbound, bool poke);

/* Opens what can be opened; returns when to be called again (monotonic ns). */
uint64_t tunnels_timers(uint64_t now);

#endif
