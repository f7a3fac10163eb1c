/* The packet tables of the session's own network stack, and packets made by hand.
 *
 * Guarantee: whatever table is in force, what is sent to an address that is not the loopback's
 * either reaches the supervisor or is refused; no program inside answers in place of the world.
 * None of this is in a memory image: after a restore the tables are those of a fresh stack. */
#ifndef SOJOURN_NAT_H
#define SOJOURN_NAT_H

#include <netinet/in.h>
#include <stdbool.h>
#include <stdint.h>

/* A port nobody listens at: what is sent there is refused. */
#define NAT_NOWHERE 1

/* Whether the tables of this program are in force. */
bool nat_present(void);
/* Sends TCP to `tcp_port` and names to `udp_port` of 127.0.0.1; 0 or an errno. */
int nat_set(uint16_t tcp_port, uint16_t udp_port);
/* The address a redirected connection was meant for; false when it was not redirected. */
bool nat_original(int fd, struct sockaddr_in *to);
/* Has the client's end of a connection, whose redirection a restore has cut, be reset: its stack
 * answers a segment out of sequence, and that answer meets nobody. Only before nat_set. */
void nat_poke(const struct sockaddr_in *server, const struct sockaddr_in *client);

#endif
