/*-------------------------------------------------------------------------
 *
 * request/keygen.c
 *	  Generating keys: derived from a key, from content, or new.
 *
 * An operation passes a derived key to the next service, such as a payment provider, so
 * that a retry sends the same key.  Derived and natural keys must never change: another
 * layout needs another label.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "catalog/pg_type.h"
#include "common/sha2.h"
#include "fmgr.h"
#include "utils/array.h"
#include "utils/builtins.h"
#include "utils/fmgrprotos.h"
#include "utils/timestamp.h"
#include "utils/uuid.h"

#include "base/compat.h"
#include "base/errors.h"
#include "request/request.h"

PG_FUNCTION_INFO_V1(idempotency_derive_key);
PG_FUNCTION_INFO_V1(idempotency_natural_key);
PG_FUNCTION_INFO_V1(idempotency_uuidv7);

/* The labels of the digests. */
#define DERIVED_LABEL "idempotency derived key 1"
#define NATURAL_LABEL "idempotency natural key 1"

/*
 * UuidMark sets version and variant (RFC 9562) of a UUID.
 */
static void
UuidMark(pg_uuid_t *uuid, int version)
{
	uuid->data[6] = (uuid->data[6] & 0x0F) | (version << 4);
	uuid->data[8] = (uuid->data[8] & 0x3F) | 0x80;
}

/*
 * idempotency_derive_key is derive_key(scope, key, step): the first bytes of the digest of
 * the three, as a UUID of version 8.  Throws IK400 for an empty one, and for an array or an
 * object.
 */
Datum
idempotency_derive_key(PG_FUNCTION_ARGS)
{
	static const char *const names[] = {"scope", "key", "step"};
	pg_uuid_t *uuid = palloc(sizeof(pg_uuid_t));
	StringInfoData parts;
	bytea *digest;

	PartsBegin(&parts, DERIVED_LABEL);
	for (int i = 0; i < (int) lengthof(names); i++)
	{
		text *part = PG_GETARG_TEXT_PP(i);

		if (VARSIZE_ANY_EXHDR(part) == 0)
			ErrorNameMissing(names[i]);
		RefuseObjectText(part, names[i]);
		PartsAdd(&parts, part);
	}
	digest = PartsDigest(&parts);

	memcpy(uuid->data, VARDATA_ANY(digest), UUID_LEN);
	UuidMark(uuid, 8);
	pfree(digest);
	PG_RETURN_UUID_P(uuid);
}

/*
 * idempotency_natural_key is natural_key(VARIADIC identifier[]): the digest of all parts, in
 * lower-case hexadecimal digits.  Throws IK400 if there are none or one is NULL, an array
 * or an object, and 22023 for an array of several dimensions.
 */
Datum
idempotency_natural_key(PG_FUNCTION_ARGS)
{
	text *key = palloc(VARHDRSZ + 2 * PG_SHA256_DIGEST_LENGTH);
	ArrayType *array = PG_ARGISNULL(0) ? NULL : PG_GETARG_ARRAYTYPE_P(0);
	StringInfoData parts;
	Datum *elements;
	bool *nulls;
	int count = 0;
	bytea *digest;

	if (array != NULL && ARR_NDIM(array) > 1)
		ErrorBadArgument("parts of a natural key have more than one dimension",
						 "Pass an array of one dimension.");
	/* idempotency.identifier, which is stored as text */
	if (array != NULL)
		deconstruct_array(array, ARR_ELEMTYPE(array), -1, false, TYPALIGN_INT, &elements, &nulls,
						  &count);
	if (count == 0)
		ereport(ERROR,
				(errcode(ERRCODE_IDEMPOTENCY_BAD_KEY), errmsg("natural key has no parts"),
				 errhint("Pass the values that identify the operation, each as an argument.")));

	PartsBegin(&parts, NATURAL_LABEL);
	for (int i = 0; i < count; i++)
	{
		text *part;

		if (nulls[i])
			ereport(ERROR, (errcode(ERRCODE_IDEMPOTENCY_BAD_KEY),
							errmsg("part of a natural key is missing"),
							errhint("Pass a text that stands for a missing value, such as "
									"coalesce(value, '').")));
		part = DatumGetTextPP(elements[i]);
		RefuseObjectText(part, "key part");
		PartsAdd(&parts, part);
	}
	digest = PartsDigest(&parts);

	hex_encode(VARDATA_ANY(digest), PG_SHA256_DIGEST_LENGTH, VARDATA(key));
	SET_VARSIZE(key, VARHDRSZ + 2 * PG_SHA256_DIGEST_LENGTH);
	pfree(digest);
	PG_RETURN_TEXT_P(key);
}

#ifdef SERVER_MAKES_UUIDV7

/*
 * NewUuidV7 returns a new UUID of version 7, from the server.
 */
pg_uuid_t *
NewUuidV7(void)
{
	LOCAL_FCINFO(call, 0);

	InitFunctionCallInfoData(*call, NULL, 0, InvalidOid, NULL, NULL);
	return DatumGetUUIDP(uuidv7(call));
}

#else

/*
 * NextTick returns the time in 4096ths of a millisecond since 1970, later than all values
 * that it has returned in this backend, even if the clock was set back.
 */
static uint64
NextTick(void)
{
	static uint64 last = 0;
	uint64 now =
		GetCurrentTimestamp() + (POSTGRES_EPOCH_JDATE - UNIX_EPOCH_JDATE) * (uint64) USECS_PER_DAY;
	uint64 tick = ((now / 1000) << 12) | (((now % 1000) << 12) / 1000);

	last = Max(tick, last + 1);
	return last;
}

/*
 * NextRandom fills 8 random bytes.  They are drawn in blocks, because a draw is a system call.
 * Throws XX000 if the system has none.
 */
static void
NextRandom(unsigned char *bytes)
{
	static unsigned char block[512];
	static Size used = sizeof(block);

	if (used == sizeof(block))
	{
		if (!pg_strong_random(block, sizeof(block)))
			elog(ERROR, "could not generate random values");
		used = 0;
	}
	memcpy(bytes, block + used, 8);
	used += 8;
}

/*
 * NewUuidV7 returns a new UUID of version 7: 48 bits of milliseconds, 12 of
 * their fraction, 62 random ones.
 */
pg_uuid_t *
NewUuidV7(void)
{
	pg_uuid_t *uuid = palloc(sizeof(pg_uuid_t));
	uint64 tick = NextTick();
	uint64 milliseconds = tick >> 12;

	NextRandom(uuid->data + 8);
	for (int i = 0; i < 6; i++)
		uuid->data[i] = (unsigned char) (milliseconds >> (40 - 8 * i));
	uuid->data[6] = (unsigned char) ((tick >> 8) & 0x0F);
	uuid->data[7] = (unsigned char) tick;
	UuidMark(uuid, 7);
	return uuid;
}

#endif /* SERVER_MAKES_UUIDV7 */

/*
 * uuidv7() RETURNS uuid
 */
Datum
idempotency_uuidv7(PG_FUNCTION_ARGS)
{
	PG_RETURN_UUID_P(NewUuidV7());
}
