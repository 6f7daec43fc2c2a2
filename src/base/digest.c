/*-------------------------------------------------------------------------
 *
 * base/digest.c
 *	  SHA-256, by the library that the server was built with.
 *
 * The server's interface to OpenSSL looks the algorithm up by name for each digest, which
 * takes longer than to hash a short text.  This file looks it up once.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#ifdef USE_OPENSSL
#include <openssl/evp.h>
#else
#include "common/cryptohash.h"
#endif

#include "base/digest.h"

#ifdef USE_OPENSSL

/*
 * Sha256 returns OpenSSL's SHA-256, which the backend keeps until it exits; NULL if
 * OpenSSL does not offer it.
 */
static const EVP_MD *
Sha256(void)
{
#if OPENSSL_VERSION_NUMBER >= 0x30000000L
	static const EVP_MD *algorithm = NULL;

	if (algorithm == NULL)
		algorithm = EVP_MD_fetch(NULL, "SHA256", NULL);
	return algorithm;
#else
	return EVP_sha256();
#endif
}

static bool
Compute(const void *data, size_t length, uint8 *digest)
{
	static EVP_MD_CTX *context = NULL;
	const EVP_MD *algorithm = Sha256();

	if (context == NULL)
		context = EVP_MD_CTX_new();
	return context != NULL && algorithm != NULL &&
		   EVP_DigestInit_ex(context, algorithm, NULL) == 1 &&
		   EVP_DigestUpdate(context, data, length) == 1 &&
		   EVP_DigestFinal_ex(context, digest, NULL) == 1;
}

#else

static bool
Compute(const void *data, size_t length, uint8 *digest)
{
	pg_cryptohash_ctx *context = pg_cryptohash_create(PG_SHA256);
	bool computed = context != NULL && pg_cryptohash_init(context) >= 0 &&
					pg_cryptohash_update(context, data, length) >= 0 &&
					pg_cryptohash_final(context, digest, PG_SHA256_DIGEST_LENGTH) >= 0;

	pg_cryptohash_free(context);
	return computed;
}

#endif

/*
 * DigestCompute stores the SHA-256 of "length" bytes into "digest", which has
 * PG_SHA256_DIGEST_LENGTH bytes.  Throws XX000 if the library refuses.
 */
void
DigestCompute(const void *data, size_t length, uint8 *digest)
{
	if (!Compute(data, length, digest))
		ereport(ERROR, (errcode(ERRCODE_INTERNAL_ERROR), errmsg("could not compute SHA-256 hash")));
}
