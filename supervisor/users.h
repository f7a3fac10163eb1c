/* Users and groups of the template, read from its /etc/passwd and /etc/group.
 *
 * Guarantee: no name service is consulted, so a static program gives the same answer in every
 * template; a number needs no entry. */
#ifndef SOJOURN_USERS_H
#define SOJOURN_USERS_H

#include <stdbool.h>
#include <sys/types.h>

#define MAX_GROUPS 256

struct user {
    uid_t uid;
    gid_t gid;
    char name[128]; /* empty when /etc/passwd has no entry */
    char home[512];
    gid_t groups[MAX_GROUPS];
    int group_count;
};

/* `spec` is NAME or UID, optionally with :GROUP or :GID. Returns 0 or an errno (ENOENT: unknown). */
int user_find(const char *spec, struct user *user);

#endif
