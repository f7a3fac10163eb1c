/* Byte buffers and bounds-checked readers; see bytes.h for the guarantee. */
#include "bytes.h"

#include <errno.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* What the supervisor holds is bounded by the limits in wire.h; when even that is not to be had,
 * nothing sensible can go on inside, and the node learns it from the end of the sandbox. */
static void *or_die(void *memory)
{
    if (!memory) {
        static const char text[] = "sojourn-supervisor: out of memory\n";
        ssize_t ignored = write(2, text, sizeof text - 1);
        (void)ignored;
        _exit(112);
    }
    return memory;
}

void *checked_malloc(size_t size) { return or_die(malloc(size ? size : 1)); }
void *checked_calloc(size_t count, size_t size) { return or_die(calloc(count ? count : 1, size)); }
void *checked_realloc(void *old, size_t size) { return or_die(realloc(old, size ? size : 1)); }

void bytes_reserve(struct bytes *b, size_t more)
{
    size_t need = b->length + more;
    if (need <= b->capacity)
        return;
    size_t capacity = b->capacity ? b->capacity : 256;
    while (capacity < need)
        capacity *= 2;
    b->data = checked_realloc(b->data, capacity);
    b->capacity = capacity;
}

void bytes_append(struct bytes *b, const void *data, size_t length)
{
    if (!length)
        return;
    bytes_reserve(b, length);
    memcpy(b->data + b->length, data, length);
    b->length += length;
}

void bytes_drop_front(struct bytes *b, size_t length)
{
    b->length -= length;
    if (b->length)
        memmove(b->data, b->data + length, b->length);
    else if (b->capacity > 65536)
        bytes_free(b);
}

void bytes_free(struct bytes *b)
{
    free(b->data);
    memset(b, 0, sizeof *b);
}

void put_u8(struct bytes *b, uint8_t v) { bytes_append(b, &v, 1); }
/* The only machines gVisor runs on are little-endian, and so is the wire. */
void put_u16(struct bytes *b, uint16_t v) { bytes_append(b, &v, 2); }
void put_u32(struct bytes *b, uint32_t v) { bytes_append(b, &v, 4); }
void put_u64(struct bytes *b, uint64_t v) { bytes_append(b, &v, 8); }

void put_blob(struct bytes *b, const void *data, size_t length)
{
    put_u32(b, (uint32_t)length);
    bytes_append(b, data, length);
}

void put_text(struct bytes *b, const char *text)
{
    size_t length = strlen(text);
    put_u32(b, (uint32_t)length);
    bytes_append(b, text, length + 1);
}

static bool take(struct reader *r, void *to, size_t length)
{
    if (r->bad || (size_t)(r->end - r->at) < length) {
        r->bad = true;
        memset(to, 0, length);
        return false;
    }
    memcpy(to, r->at, length);
    r->at += length;
    return true;
}

#define GETTER(name, type)                                                                         \
    type name(struct reader *r)                                                                    \
    {                                                                                              \
        type v;                                                                                    \
        take(r, &v, sizeof v);                                                                     \
        return v;                                                                                  \
    }
GETTER(get_u8, uint8_t)
GETTER(get_u16, uint16_t)
GETTER(get_u32, uint32_t)
GETTER(get_u64, uint64_t)

const unsigned char *get_blob(struct reader *r, uint32_t *length)
{
    *length = get_u32(r);
    if (r->bad || (size_t)(r->end - r->at) < *length) {
        r->bad = true;
        *length = 0;
        return (const unsigned char *)"";
    }
    const unsigned char *found = r->at;
    r->at += *length;
    return found;
}

char *get_text(struct reader *r, uint32_t *length)
{
    static char empty[1];
    uint32_t size;
    const unsigned char *found = get_blob(r, &size);
    if (length)
        *length = 0;
    if (r->bad || r->at == r->end || *r->at != 0 || memchr(found, 0, size)) {
        r->bad = true;
        empty[0] = 0;
        return empty;
    }
    r->at++;
    if (length)
        *length = size;
    return (char *)found;
}

char *get_path(struct reader *r, int *error)
{
    uint32_t length;
    char *path = get_text(r, &length);
    if (!r->bad && !*error) {
        if (length >= PATH_MAX)
            *error = ENAMETOOLONG;
        else if (path[0] != '/')
            *error = EINVAL;
    }
    return path;
}
