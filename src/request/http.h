/*-------------------------------------------------------------------------
 *
 * request/http.h
 *	  What HTTP says about idempotency keys, in and out.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_REQUEST_HTTP_H
#define IDEMPOTENCY_REQUEST_HTTP_H

extern text *ProblemDocument(int status, const char *title, const char *detail);

#endif /* IDEMPOTENCY_REQUEST_HTTP_H */
