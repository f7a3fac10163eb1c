/* Files of the session, by absolute path, as raw bytes.
 *
 * Guarantee: names are never interpreted, links are followed only where the request says so, and
 * removing a tree never leaves it. No descriptor outlives a request, because a file that loses its
 * name while it is open cannot be captured. */
#ifndef SOJOURN_FILES_H
#define SOJOURN_FILES_H

#include "connection.h"

#include <sys/stat.h>

void files_stat(struct request *request);
void files_read(struct request *request);
void files_mkdir(struct request *request);
void files_remove(struct request *request);
void files_move(struct request *request);
void files_chmod(struct request *request);
void files_chown(struct request *request);
void files_utime(struct request *request);
void files_symlink(struct request *request);
void files_link(struct request *request);
void files_mknod(struct request *request);

/* Whom new files and directories belong to when the request names nobody. */
void files_defaults(const char *user);
int files_owner(const char *user, uid_t *uid, gid_t *gid); /* "": the default; 0 or an errno */

void files_put_stat(struct bytes *to, const struct stat *status, const char *target);
/* Status of `path` with a link's target; answers by itself on failure. */
bool files_answer_stat(const struct request *request, const char *path, bool follow);
/* Makes the missing directories above the last component of `path`; 0 or an errno. */
int files_parents(const char *path, uid_t uid, gid_t gid);

#endif
