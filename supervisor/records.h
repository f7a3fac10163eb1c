/* What the node asks of the records; see process.h for the guarantee. */
#ifndef SOJOURN_RECORDS_H
#define SOJOURN_RECORDS_H

/* Keeps the ended records within their bounds. */
void records_bound(void);

#endif
