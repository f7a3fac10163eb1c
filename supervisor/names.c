/* Names and the addresses that stand for them inside; see names.h for the guarantee. */
#include "names.h"

#include "bytes.h"

#include <arpa/inet.h>
#include <string.h>
#include <stdlib.h>

#define FIRST_ADDRESS 0xc6120001u /* 198.18.0.1 */
#define HEADER 12
#define TYPE_A 1
#define CLASS_IN 1
#define ERROR_FORMAT 1
#define ERROR_NAME 3
#define ERROR_KIND 4 /* not implemented */
#define TTL 1
#define BUCKETS (1u << 14)

struct name {
    struct name *same;          /* the next in its bucket */
    struct name *newer, *older; /* by use */
    uint32_t number;
    char text[];
};

static struct name **buckets; /* made at the first name: most sessions ask for none */
static struct name **numbers; /* by address */
static uint32_t count, capacity;
static struct name *newest, *oldest;

static uint32_t bucket_of(const char *text)
{
    uint64_t hash = 14695981039346656037ull; /* FNV-1a */
    for (; *text; text++)
        hash = (hash ^ (unsigned char)*text) * 1099511628211ull;
    return (uint32_t)(hash ^ hash >> 32) % BUCKETS;
}

static void unlink_use(struct name *name)
{
    *(name->newer ? &name->newer->older : &newest) = name->older;
    *(name->older ? &name->older->newer : &oldest) = name->newer;
}

static void link_newest(struct name *name)
{
    name->newer = NULL;
    name->older = newest;
    *(newest ? &newest->newer : &oldest) = name;
    newest = name;
}

static uint32_t forget_oldest(void)
{
    struct name *name = oldest, **at = &buckets[bucket_of(name->text)];
    uint32_t number = name->number;
    while (*at != name)
        at = &(*at)->same;
    *at = name->same;
    unlink_use(name);
    free(name);
    return number;
}

static uint32_t number_of(const char *text)
{
    if (!buckets)
        buckets = checked_calloc(BUCKETS, sizeof *buckets);
    for (struct name *name = buckets[bucket_of(text)]; name; name = name->same)
        if (!strcmp(name->text, text)) {
            unlink_use(name);
            link_newest(name);
            return name->number;
        }
    uint32_t number = count < MOST_NAMES ? count++ : forget_oldest();
    if (number >= capacity) {
        capacity = capacity ? capacity * 2 : 64;
        numbers = checked_realloc(numbers, capacity * sizeof *numbers);
    }
    size_t size = strlen(text) + 1;
    struct name *name = checked_malloc(sizeof *name + size), **bucket = &buckets[bucket_of(text)];
    memcpy(name->text, text, size);
    name->number = number;
    name->same = *bucket;
    *bucket = name;
    numbers[number] = name;
    link_newest(name);
    return number;
}

const char *names_of(struct in_addr address)
{
    uint32_t number = ntohl(address.s_addr) - FIRST_ADDRESS;
    if (number >= count)
        return NULL;
    unlink_use(numbers[number]);
    link_newest(numbers[number]);
    return numbers[number]->text;
}

/* -- questions ------------------------------------------------------------------------------- */

static uint16_t get16(const unsigned char *at) { return (uint16_t)(at[0] << 8 | at[1]); }

static void put16(unsigned char *at, unsigned value)
{
    at[0] = (unsigned char)(value >> 8);
    at[1] = (unsigned char)value;
}

static bool letter(unsigned char c)
{
    return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '-' || c == '_';
}

/* Reads a name (no question has a reason to point elsewhere in itself): its length in the message,
 * 0 when it is none. `text` is in small letters, with dots, "" when it is not a host's. */
static size_t read_name(const unsigned char *at, size_t left, char text[NAME_SIZE],
                        unsigned *labels)
{
    size_t used = 0, length = 0;
    bool plain = true;
    *labels = 0;
    for (;;) {
        if (used >= left)
            return 0;
        size_t size = at[used++];
        if (!size)
            break;
        if (size > 63 || size > left - used || used + size > 254)
            return 0;
        if (length)
            text[length++] = '.';
        for (size_t i = 0; i < size; i++) {
            unsigned char c = at[used + i];
            if (c >= 'A' && c <= 'Z')
                c = (unsigned char)(c | 32);
            plain = plain && letter(c);
            text[length++] = (char)c;
        }
        used += size;
        ++*labels;
    }
    text[plain ? length : 0] = 0;
    return used;
}

size_t names_answer(const unsigned char *question, size_t size, unsigned char answer[ANSWER_SIZE])
{
    char text[NAME_SIZE];
    unsigned labels, code = 0, answers = 0;
    if (size < HEADER || question[2] & 0x80)
        return 0; /* no question: an answer to it could be answered again, and so on */
    size_t end = HEADER, name = 0;
    unsigned kind = question[2] >> 3 & 15, questions = get16(question + 4);
    if (questions == 1)
        name = read_name(question + HEADER, size - HEADER, text, &labels);
    if (kind)
        code = ERROR_KIND;
    else if (!name || size - HEADER - name < 4)
        code = ERROR_FORMAT;
    else {
        unsigned type = get16(question + HEADER + name);
        end = HEADER + name + 4;
        if (get16(question + HEADER + name + 2) != CLASS_IN)
            code = ERROR_KIND;
        else if (labels && (labels < 2 || !*text))
            code = ERROR_NAME; /* names of one label are the hosts file's */
        else
            answers = type == TYPE_A && labels;
    }
    memcpy(answer, question, end);
    answer[2] = (unsigned char)(0x80 | (question[2] & 0x79)); /* an answer, asked as it was */
    answer[3] = (unsigned char)(0x80 | code);                  /* recursion is available */
    put16(answer + 4, end > HEADER);
    put16(answer + 6, answers);
    memset(answer + 8, 0, 4);
    if (answers) {
        unsigned char *at = answer + end;
        uint32_t address = htonl(FIRST_ADDRESS + number_of(text));
        put16(at, 0xc000 | HEADER);
        put16(at + 2, TYPE_A);
        put16(at + 4, CLASS_IN);
        put16(at + 6, 0);
        put16(at + 8, TTL);
        put16(at + 10, sizeof address);
        memcpy(at + 12, &address, sizeof address);
        end += 12 + sizeof address;
    }
    return end;
}
