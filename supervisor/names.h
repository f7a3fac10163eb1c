/* Names and the addresses that stand for them inside.
 *
 * Guarantee: a question is answered from here alone, whatever bytes it is made of; nothing of it
 * leaves. Each name has an address of its own in 198.18.0.0/15 until MOST_NAMES others were asked
 * for since it was last used. All of it is memory: it goes with the session. */
#ifndef SOJOURN_NAMES_H
#define SOJOURN_NAMES_H

#include <netinet/in.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define MOST_NAMES 131000u
#define NAME_SIZE 256      /* with the zero byte */
#define ANSWER_SIZE 512

/* Makes the answer to a question of `size` bytes; returns its size, 0: none is due. */
size_t names_answer(const unsigned char *question, size_t size,
                    unsigned char answer[ANSWER_SIZE]);
/* The name an address stands for; NULL when it stands for none. */
const char *names_of(struct in_addr address);

#endif
