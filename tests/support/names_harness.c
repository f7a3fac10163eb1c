/* Answers questions as the supervisor does. Input: u16 length and question, again and again; output
 * the same of answers (length 0: none). An address on the command line is looked up in the end. */
#include "../../supervisor/names.h"

#include <arpa/inet.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int main(int argc, char **argv)
{
    uint16_t size;
    while (fread(&size, sizeof size, 1, stdin) == 1) {
        /* Exactly as long as it is, so that one byte further is noticed. */
        unsigned char *question = malloc(size ? size : 1), answer[ANSWER_SIZE];
        if (!question || fread(question, 1, size, stdin) != size)
            return 1;
        uint16_t length = (uint16_t)names_answer(question, size, answer);
        fwrite(&length, sizeof length, 1, stdout);
        fwrite(answer, 1, length, stdout);
        free(question);
    }
    for (int i = 1; i < argc; i++) {
        const char *name = names_of((struct in_addr){inet_addr(argv[i])});
        fprintf(stderr, "%s\n", name ? name : "-");
    }
    return 0;
}
