/* Removing and moving whole trees.
 *
 * Guarantee: work goes from directory descriptor to directory descriptor and never follows a link,
 * so nothing outside the tree is touched however its inhabitants rename things meanwhile. */
#ifndef SOJOURN_TREES_H
#define SOJOURN_TREES_H

/* For jobs_start; both return 0 or an errno. */
int trees_remove_job(const char *path, const char *unused);
int trees_move_job(const char *source, const char *target);

#endif
