/* Packet tables and packets made by hand; see nat.h for the guarantee. */
#include "nat.h"

#include "bytes.h"

#include <arpa/inet.h>
#include <errno.h>
#include <linux/netfilter_ipv4/ip_tables.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define ORIGINAL_DESTINATION 80 /* SO_ORIGINAL_DST of linux/netfilter_ipv4.h */
#define ACCEPT (-NF_ACCEPT - 1)
#define DROP (-NF_DROP - 1)
#define FILTER_HOOKS (1u << NF_INET_LOCAL_IN | 1u << NF_INET_FORWARD | 1u << NF_INET_LOCAL_OUT)
#define NAT_HOOKS                                                                                  \
    (1u << NF_INET_PRE_ROUTING | 1u << NF_INET_LOCAL_IN | 1u << NF_INET_LOCAL_OUT |                \
     1u << NF_INET_POST_ROUTING)

struct redirect { /* struct nf_nat_ipv4_multi_range_compat with its header, aligned */
    struct xt_entry_target target;
    uint32_t count, flags, first, last;
    uint16_t port_first, port_last;
    uint32_t padding;
};

struct udp_match {
    struct xt_entry_match match;
    uint16_t source[2], destination[2];
    uint8_t inverse, padding[7];
};

struct last {
    struct xt_entry_target target;
    char name[XT_FUNCTION_MAXNAMELEN];
    uint16_t padding;
};

struct rule {
    uint32_t source, destination, mask; /* network order; the mask holds for the one that is set */
    uint8_t protocol;
    uint16_t udp_port; /* matched when it is set */
};

static const struct rule any;

/* Starts an entry; its target follows. Returns where the entry is, for its length. */
static size_t begin(struct bytes *to, const struct rule *rule)
{
    size_t at = to->length;
    struct ipt_entry entry = {.ip = {.proto = rule->protocol}, .target_offset = sizeof entry};
    if (rule->source) {
        entry.ip.src.s_addr = rule->source;
        entry.ip.smsk.s_addr = rule->mask;
    }
    if (rule->destination) {
        entry.ip.dst.s_addr = rule->destination;
        entry.ip.dmsk.s_addr = rule->mask;
    }
    struct udp_match match = {.match.u.user = {.match_size = sizeof match, .name = "udp"},
                              .source = {0, 65535},
                              .destination = {rule->udp_port, rule->udp_port}};
    if (rule->udp_port)
        entry.target_offset += sizeof match;
    bytes_append(to, &entry, sizeof entry);
    if (rule->udp_port)
        bytes_append(to, &match, sizeof match);
    return at;
}

static void end(struct bytes *to, size_t at, const void *target, size_t size)
{
    bytes_append(to, target, size);
    struct ipt_entry *entry = (struct ipt_entry *)(to->data + at);
    entry->next_offset = (uint16_t)(to->length - at);
}

static uint32_t verdict(struct bytes *to, const struct rule *rule, int what)
{
    struct xt_standard_target target = {.target.u.user.target_size = sizeof target,
                                        .verdict = what};
    size_t at = begin(to, rule);
    end(to, at, &target, sizeof target);
    return (uint32_t)at;
}

static void redirect(struct bytes *to, const struct rule *rule, uint16_t port)
{
    struct redirect target = {
        .target.u.user = {.target_size = sizeof target, .name = "REDIRECT"},
        .count = 1,
        .flags = 2, /* ports are given */
        .port_first = htons(port),
        .port_last = htons(port),
    };
    size_t at = begin(to, rule);
    end(to, at, &target, sizeof target);
}

static void finish(struct bytes *to)
{
    struct last target = {.target.u.user = {.target_size = sizeof target, .name = "ERROR"},
                          .name = "ERROR"};
    size_t at = begin(to, &any);
    end(to, at, &target, sizeof target);
}

static int raw_socket(void)
{
    return socket(AF_INET, SOCK_RAW | SOCK_CLOEXEC | SOCK_NONBLOCK, IPPROTO_RAW);
}

static int replace(const char *name, unsigned hooks, const uint32_t starts[NF_INET_NUMHOOKS],
                   const uint32_t policies[NF_INET_NUMHOOKS], unsigned count,
                   const struct bytes *entries)
{
    struct ipt_replace head = {.valid_hooks = hooks,
                               .num_entries = count,
                               .size = (uint32_t)entries->length,
                               .num_counters = 5};
    strncpy(head.name, name, sizeof head.name - 1);
    memcpy(head.hook_entry, starts, sizeof head.hook_entry);
    memcpy(head.underflow, policies, sizeof head.underflow);
    struct bytes whole = {0};
    bytes_append(&whole, &head, sizeof head);
    bytes_append(&whole, entries->data, entries->length);
    int fd = raw_socket(), error = 0;
    if (fd < 0 || setsockopt(fd, IPPROTO_IP, IPT_SO_SET_REPLACE, whole.data,
                             (socklen_t)whole.length) < 0)
        error = errno;
    if (fd >= 0)
        close(fd);
    bytes_free(&whole);
    return error;
}

static struct rule loopback_destination(void)
{
    return (struct rule){.destination = htonl(0x7f000000), .mask = htonl(0xff000000)};
}

#define FILTER_ENTRIES 7

/* An echo request to any address would be answered by the stack itself, as the addresses are all
 * its own. Errors of a redirected datagram come from the loopback and pass. */
static int set_filter(void)
{
    struct rule to = loopback_destination(), icmp = {.protocol = IPPROTO_ICMP};
    struct rule from = {.source = to.destination, .mask = to.mask};
    struct bytes entries = {0};
    uint32_t in = verdict(&entries, &any, ACCEPT);
    uint32_t forward = verdict(&entries, &any, ACCEPT);
    uint32_t out = verdict(&entries, &from, ACCEPT);
    verdict(&entries, &to, ACCEPT);
    verdict(&entries, &icmp, DROP);
    uint32_t out_end = verdict(&entries, &any, ACCEPT);
    finish(&entries);
    int error = replace("filter", FILTER_HOOKS, (uint32_t[]){0, in, forward, out, 0},
                        (uint32_t[]){0, in, forward, out_end, 0}, FILTER_ENTRIES, &entries);
    bytes_free(&entries);
    return error;
}

static int set_nat(uint16_t tcp_port, uint16_t udp_port)
{
    struct rule loopback = loopback_destination(), tcp = {.protocol = IPPROTO_TCP};
    struct rule names = {.protocol = IPPROTO_UDP, .udp_port = 53}, udp = {.protocol = IPPROTO_UDP};
    struct bytes entries = {0};
    uint32_t before = verdict(&entries, &any, ACCEPT);
    uint32_t in = verdict(&entries, &any, ACCEPT);
    uint32_t out = verdict(&entries, &loopback, ACCEPT);
    redirect(&entries, &tcp, tcp_port);
    redirect(&entries, &names, udp_port);
    redirect(&entries, &udp, NAT_NOWHERE);
    uint32_t out_end = verdict(&entries, &any, ACCEPT);
    uint32_t after = verdict(&entries, &any, ACCEPT);
    finish(&entries);
    int error = replace("nat", NAT_HOOKS, (uint32_t[]){before, in, 0, out, after},
                        (uint32_t[]){before, in, 0, out_end, after}, 9, &entries);
    bytes_free(&entries);
    return error;
}

int nat_set(uint16_t tcp_port, uint16_t udp_port)
{
    int error = set_nat(tcp_port, udp_port);
    return error ? error : set_filter();
}

bool nat_present(void)
{
    struct ipt_getinfo info = {.name = "filter"};
    socklen_t size = sizeof info;
    int fd = raw_socket();
    bool found = fd >= 0 && !getsockopt(fd, IPPROTO_IP, IPT_SO_GET_INFO, &info, &size) &&
                 info.num_entries == FILTER_ENTRIES;
    if (fd >= 0)
        close(fd);
    return found;
}

bool nat_original(int fd, struct sockaddr_in *to)
{
    socklen_t size = sizeof *to;
    return !getsockopt(fd, IPPROTO_IP, ORIGINAL_DESTINATION, to, &size) &&
           to->sin_family == AF_INET && ntohl(to->sin_addr.s_addr) >> 24 != 127;
}

static uint16_t checksum(const void *data, size_t size, uint32_t sum)
{
    const unsigned char *at = data;
    for (size_t i = 0; i + 1 < size; i += 2)
        sum += (uint32_t)(at[i] << 8 | at[i + 1]);
    while (sum >> 16)
        sum = (sum & 0xffff) + (sum >> 16);
    return (uint16_t)~sum;
}

void nat_poke(const struct sockaddr_in *server, const struct sockaddr_in *client)
{
    struct {
        struct { /* IPv4 */
            uint8_t version, service;
            uint16_t length, id, fragment;
            uint8_t ttl, protocol;
            uint16_t sum;
            uint32_t source, destination;
        } ip;
        struct { /* TCP */
            uint16_t source, destination;
            uint32_t sequence, acknowledged;
            uint8_t offset, flags;
            uint16_t window, sum, urgent;
        } tcp;
    } packet = {
        .ip = {.version = 0x45,
               .length = htons(sizeof packet),
               .id = htons(1),
               .ttl = 64,
               .protocol = IPPROTO_TCP,
               .source = server->sin_addr.s_addr,
               .destination = client->sin_addr.s_addr},
        .tcp = {.source = server->sin_port,
                .destination = client->sin_port,
                .sequence = htonl(12345),
                .offset = sizeof packet.tcp / 4 << 4,
                .flags = 0x10, /* ACK */
                .window = htons(1024)},
    };
    struct {
        uint32_t source, destination;
        uint8_t zero, protocol;
        uint16_t length;
    } pseudo = {packet.ip.source, packet.ip.destination, 0, IPPROTO_TCP,
                htons(sizeof packet.tcp)};
    uint16_t first = checksum(&pseudo, sizeof pseudo, 0);
    packet.tcp.sum = htons(checksum(&packet.tcp, sizeof packet.tcp, (uint16_t)~first));
    int fd = raw_socket();
    if (fd < 0)
        return;
    /* Without an answer the client's end waits for its own timeout, as after any lost peer. */
    if (sendto(fd, &packet, sizeof packet, 0, (const struct sockaddr *)client, sizeof *client) < 0)
        errno = 0;
    close(fd);
}
