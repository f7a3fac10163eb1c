/* Users and groups of the template; see users.h for the guarantee. */
#include "users.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static bool number(const char *text, unsigned *value)
{
    if (!*text || strlen(text) > 10)
        return false;
    char *end;
    unsigned long found = strtoul(text, &end, 10);
    if (*end || found > 0xfffffffeul || text[0] < '0' || text[0] > '9')
        return false;
    *value = (unsigned)found;
    return true;
}

/* Splits a line at colons in place; missing fields are empty. */
static void split(char *line, char **fields, int count)
{
    static char none[1];
    line[strcspn(line, "\r\n")] = 0;
    for (int i = 0; i < count; i++) {
        fields[i] = line ? line : none;
        if (line && (line = strchr(line, ':')))
            *line++ = 0;
    }
}

static bool find_passwd(const char *name, bool by_uid, unsigned uid, struct user *user)
{
    FILE *file = fopen("/etc/passwd", "re");
    if (!file)
        return false;
    char *line = NULL;
    size_t size = 0;
    bool found = false;
    while (!found && getline(&line, &size, file) > 0) {
        char *fields[7];
        unsigned entry_uid, entry_gid;
        split(line, fields, 7);
        if (!number(fields[2], &entry_uid) || !number(fields[3], &entry_gid))
            continue;
        if (by_uid ? entry_uid != uid : strcmp(fields[0], name) != 0)
            continue;
        found = true;
        user->uid = entry_uid;
        user->gid = entry_gid;
        snprintf(user->name, sizeof user->name, "%s", fields[0]);
        snprintf(user->home, sizeof user->home, "%s", fields[5]);
    }
    free(line);
    fclose(file);
    return found;
}

static bool is_member(char *members, const char *name)
{
    for (char *rest = members, *one; (one = strsep(&rest, ","));)
        if (!strcmp(one, name))
            return true;
    return false;
}

/* Fills the supplementary groups and, when `wanted` is a group's name, its number. */
static bool read_groups(struct user *user, const char *wanted, gid_t *wanted_gid)
{
    bool found = false;
    FILE *file = fopen("/etc/group", "re");
    if (!file)
        return false;
    char *line = NULL;
    size_t size = 0;
    while (getline(&line, &size, file) > 0) {
        char *fields[4];
        unsigned gid;
        split(line, fields, 4);
        if (!number(fields[2], &gid))
            continue;
        if (wanted && !strcmp(fields[0], wanted)) {
            found = true;
            *wanted_gid = gid;
        }
        if (user->name[0] && gid != user->gid && user->group_count < MAX_GROUPS &&
            is_member(fields[3], user->name))
            user->groups[user->group_count++] = gid;
    }
    free(line);
    fclose(file);
    return found;
}

int user_find(const char *spec, struct user *user)
{
    memset(user, 0, sizeof *user);
    char name[256];
    if (strlen(spec) >= sizeof name || !*spec)
        return ENOENT;
    strcpy(name, spec);
    char *group = strchr(name, ':');
    if (group)
        *group++ = 0;
    unsigned value;
    /* A name wins over a number, as in chown(1). */
    if (!find_passwd(name, false, 0, user)) {
        if (!number(name, &value))
            return ENOENT;
        if (!find_passwd(name, true, value, user)) {
            user->uid = value;
            user->gid = value;
        }
    }
    user->groups[user->group_count++] = user->gid;
    gid_t gid = 0;
    bool known = read_groups(user, group && *group ? group : NULL, &gid);
    if (group && *group) {
        if (!known && !number(group, &gid))
            return ENOENT;
        user->gid = gid;
        user->groups[0] = gid;
    }
    if (!user->home[0])
        strcpy(user->home, "/");
    return 0;
}
