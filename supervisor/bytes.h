/* Byte buffers and bounds-checked readers.
 *
 * Guarantee: a reader never looks past the end it was given. After the first field that does not
 * fit it is `bad` and every further field is empty, so callers check once at the end. */
#ifndef SOJOURN_BYTES_H
#define SOJOURN_BYTES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct bytes {
    unsigned char *data;
    size_t length, capacity;
};

void *checked_malloc(size_t size);
void *checked_calloc(size_t count, size_t size);
void *checked_realloc(void *old, size_t size);

void bytes_reserve(struct bytes *b, size_t more);
void bytes_append(struct bytes *b, const void *data, size_t length);
void bytes_drop_front(struct bytes *b, size_t length);
void bytes_free(struct bytes *b);

void put_u8(struct bytes *b, uint8_t v);
void put_u16(struct bytes *b, uint16_t v);
void put_u32(struct bytes *b, uint32_t v);
void put_u64(struct bytes *b, uint64_t v);
void put_blob(struct bytes *b, const void *data, size_t length);
void put_text(struct bytes *b, const char *text);

struct reader {
    const unsigned char *at, *end;
    bool bad;
};

uint8_t get_u8(struct reader *r);
uint16_t get_u16(struct reader *r);
uint32_t get_u32(struct reader *r);
uint64_t get_u64(struct reader *r);
/* Raw bytes: u32 length, bytes. */
const unsigned char *get_blob(struct reader *r, uint32_t *length);
/* A string without zero bytes: u32 length, bytes, one zero byte. Points into the frame. */
char *get_text(struct reader *r, uint32_t *length);
/* A text that is an absolute path below PATH_MAX; sets *error instead of `bad` when it is not. */
char *get_path(struct reader *r, int *error);

#endif
