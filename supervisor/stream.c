/* One output stream of a process; see stream.h for the guarantee. */
#include "stream.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <unistd.h>

#define CHUNK_LEAST 512
#define CHUNK_MOST 65536

struct chunk {
    struct chunk *next;
    uint32_t start, end, capacity; /* kept bytes are data[start..end) */
    unsigned char data[];
};

static void append(struct stream *stream, const unsigned char *data, size_t length)
{
    while (length) {
        struct chunk *tail = stream->tail;
        if (!tail || tail->end == tail->capacity) {
            /* Small outputs stay small; long ones get few large chunks. */
            size_t capacity = stream->next - stream->first;
            if (capacity < length)
                capacity = length;
            if (capacity < CHUNK_LEAST)
                capacity = CHUNK_LEAST;
            if (capacity > CHUNK_MOST)
                capacity = CHUNK_MOST;
            tail = checked_malloc(sizeof *tail + capacity);
            tail->next = NULL;
            tail->start = tail->end = 0;
            tail->capacity = (uint32_t)capacity;
            if (stream->tail)
                stream->tail->next = tail;
            else
                stream->head = tail;
            stream->tail = tail;
        }
        size_t part = tail->capacity - tail->end;
        if (part > length)
            part = length;
        memcpy(tail->data + tail->end, data, part);
        tail->end += (uint32_t)part;
        stream->next += part;
        data += part;
        length -= part;
    }
    while (stream->next - stream->first > stream->keep) {
        struct chunk *head = stream->head;
        uint64_t over = stream->next - stream->first - stream->keep;
        uint32_t have = head->end - head->start;
        if (over < have) {
            head->start += (uint32_t)over;
            stream->first += over;
            break;
        }
        stream->first += have;
        stream->head = head->next;
        if (!stream->head)
            stream->tail = NULL;
        free(head);
    }
}

bool stream_fill(struct stream *stream, size_t budget)
{
    static unsigned char buffer[CHUNK_MOST];
    bool came = false;
    while (budget && stream_open(stream)) {
        size_t want = sizeof buffer < budget ? sizeof buffer : budget;
        if (stream->lossless) {
            uint64_t unread = stream->next - stream->taken;
            uint64_t room = unread < stream->keep ? stream->keep - unread : 0;
            if (!room) {
                /* A hang-up is reported even when no events are asked for, so leave the set. */
                loop_unwatch(&stream->source);
                stream->held = true;
                break;
            }
            if (want > room)
                want = (size_t)room;
        }
        ssize_t n = read(stream->source.fd, buffer, want);
        if (n > 0) {
            append(stream, buffer, (size_t)n);
            budget -= (size_t)n;
            came = true;
        } else if (n < 0 && errno == EINTR) {
            continue;
        } else if (n < 0 && errno == EAGAIN) {
            break;
        } else {
            /* End of file, or EIO: the last holder of a terminal has closed it. */
            loop_close(&stream->source);
        }
    }
    return came;
}

void stream_taken(struct stream *stream, uint64_t offset)
{
    if (offset > stream->next)
        offset = stream->next;
    if (offset > stream->taken)
        stream->taken = offset;
    if (stream->held && stream->next - stream->taken < stream->keep) {
        stream->held = false;
        if (stream_open(stream))
            loop_watch(&stream->source, EPOLLIN);
    }
}

size_t stream_put(const struct stream *stream, uint64_t offset, size_t most, struct bytes *to)
{
    if (offset < stream->first)
        offset = stream->first;
    if (offset > stream->next)
        offset = stream->next;
    uint64_t length = stream->next - offset;
    if (length > most)
        length = most;
    put_u64(to, offset);
    put_u32(to, (uint32_t)length);
    bytes_reserve(to, (size_t)length);
    uint64_t left = length, at = stream->first;
    for (struct chunk *chunk = stream->head; chunk && left; chunk = chunk->next) {
        uint64_t have = chunk->end - chunk->start;
        if (at + have > offset) {
            uint64_t skip = offset - at;
            uint64_t part = have - skip < left ? have - skip : left;
            bytes_append(to, chunk->data + chunk->start + skip, (size_t)part);
            offset += part;
            left -= part;
        }
        at += have;
    }
    return (size_t)length;
}

void stream_clear(struct stream *stream)
{
    for (struct chunk *chunk = stream->head, *next; chunk; chunk = next) {
        next = chunk->next;
        free(chunk);
    }
    stream->head = stream->tail = NULL;
    stream->first = stream->next;
}

void stream_close(struct stream *stream)
{
    loop_close(&stream->source);
    stream_clear(stream);
}
