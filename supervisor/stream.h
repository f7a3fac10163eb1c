/* One output stream of a process, kept in memory under absolute offsets.
 *
 * Guarantee: a byte has one offset for ever. At most `keep` bytes are held; the oldest go first,
 * unless the stream is lossless, where the process is held back instead. */
#ifndef SOJOURN_STREAM_H
#define SOJOURN_STREAM_H

#include "bytes.h"
#include "loop.h"

struct chunk;

struct stream {
    struct source source;
    bool lossless, held;
    uint64_t keep;
    uint64_t first, next; /* offsets of the oldest kept byte and of the byte to come */
    uint64_t taken;       /* what a reader has asked beyond of: its confirmed progress */
    struct chunk *head, *tail;
};

/* Reads until the pipe is empty, ended, or `budget` is used up; returns whether bytes came. */
bool stream_fill(struct stream *stream, size_t budget);
/* A reader has everything below `offset`; a held stream may go on. */
void stream_taken(struct stream *stream, uint64_t offset);
/* Puts u64 offset and a blob of at most `most` kept bytes from `offset` on; returns the length. */
size_t stream_put(const struct stream *stream, uint64_t offset, size_t most, struct bytes *to);
void stream_clear(struct stream *stream); /* drops what is kept */
void stream_close(struct stream *stream); /* closes and drops */

static inline bool stream_open(const struct stream *stream) { return stream->source.fd >= 0; }

#endif
