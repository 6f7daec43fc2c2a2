/*-------------------------------------------------------------------------
 *
 * number.c
 *	  One text for one number: RFC 8785, but exact.
 *
 * RFC 8785 takes every number for a double and prints it as ECMAScript does.
 * An amount with twenty digits would then share its text, and its fingerprint,
 * with its neighbours.  So a number has ECMAScript's form where that says the
 * same value, and all its digits, in plain notation, where it does not.
 *
 * Pure functions: nothing here takes a lock or outlives the call.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include <math.h>

#include "common/shortest_dec.h"

#include "number.h"

/* A double never needs more decimal digits than this. */
#define MAX_SHORTEST_DIGITS 17

/* Two decimals of this many digits never read as the same normal double. */
#define SAFE_DIGITS 15

/* Decimal exponents (of 0.DIGITS) within which every double is normal. */
#define MIN_NORMAL_POINT (-306)
#define MAX_NORMAL_POINT 308

/* Decimal points (of 0.DIGITS) within which ECMAScript writes no exponent. */
#define MIN_PLAIN_POINT (-5)
#define MAX_PLAIN_POINT 21

/*
 * A decimal number without its sign: mantissa times ten to the exponent, where
 * the mantissa has "count" digits and does not end in zero.
 */
typedef struct Decimal
{
	uint64 mantissa;
	int count;
	int exponent;
} Decimal;

/* Where the decimal point stands if the value is written 0.DIGITS. */
#define DecimalPoint(decimal) ((decimal)->count + (decimal)->exponent)

/*
 * DecimalFromText reads the digits of a number as numeric_normalize() or the
 * server's shortest double output prints it, and ignores its sign.  Returns
 * false, and an undefined decimal, if it has more digits than any double
 * needs.  Zero has no digits.
 */
static bool
DecimalFromText(const char *number, Decimal *decimal)
{
	bool fraction = false;
	int zeros = 0; /* read, but not yet known not to be trailing */

	decimal->mantissa = 0;
	decimal->count = 0;
	decimal->exponent = 0;

	if (*number == '-')
		number++;
	for (; *number != '\0' && *number != 'e'; number++)
	{
		if (*number == '.')
		{
			fraction = true;
			continue;
		}
		if (fraction)
			decimal->exponent--;
		if (*number == '0')
		{
			if (decimal->count > 0)
				zeros++;
			continue;
		}
		if (decimal->count + zeros >= MAX_SHORTEST_DIGITS)
			return false;
		decimal->count += zeros + 1;
		for (; zeros > 0; zeros--)
			decimal->mantissa *= 10;
		decimal->mantissa = decimal->mantissa * 10 + (*number - '0');
	}

	decimal->exponent += zeros;
	if (*number == 'e')
		decimal->exponent += atoi(number + 1);
	return true;
}

/*
 * ReadDecimal returns the double nearest to mantissa times ten to the
 * exponent; infinity above and zero below the range of doubles.
 */
static double
ReadDecimal(uint64 mantissa, int exponent)
{
	char buffer[64];

	/* the server keeps LC_NUMERIC at C, and there is no decimal point anyway */
	snprintf(buffer, sizeof(buffer), UINT64_FORMAT "e%d", mantissa, exponent);
	return strtod(buffer, NULL);
}

/*
 * DecimalIsShortest returns whether ECMAScript would print exactly this
 * decimal for the double nearest to it.
 *
 * That is so if no decimal with fewer digits reads as the same double, and
 * none of as many digits is nearer to it.  Fewer digits: only the two
 * neighbours with one digit less need a look, since the decimals that read as
 * one double are an interval.  The server's own shortest output tells the
 * nearest; it alone would not do, because it takes no decimal that lies
 * half-way between two doubles, where ECMAScript has 1e+23.
 */
static bool
DecimalIsShortest(const Decimal *decimal)
{
	char buffer[DOUBLE_SHORTEST_DECIMAL_LEN];
	Decimal nearest;
	double value;

	if (decimal->count <= SAFE_DIGITS && DecimalPoint(decimal) >= MIN_NORMAL_POINT &&
		DecimalPoint(decimal) <= MAX_NORMAL_POINT)
		return true;

	value = ReadDecimal(decimal->mantissa, decimal->exponent);
	if (value == 0 || isinf(value))
		return false;

	if (decimal->count > 1)
	{
		uint64 shorter = decimal->mantissa / 10;

		if (ReadDecimal(shorter, decimal->exponent + 1) == value ||
			ReadDecimal(shorter + 1, decimal->exponent + 1) == value)
			return false;
	}

	double_to_shortest_decimal_buf(value, buffer);
	if (!DecimalFromText(buffer, &nearest) || nearest.count > decimal->count)
		return true;
	return nearest.mantissa == decimal->mantissa && nearest.exponent == decimal->exponent;
}

/*
 * NumberAppend appends the canonical form of a number.  ECMAScript's plain form, which it uses from
 * 1e-6 to below 1e21, is the exact one; beyond, its exponent form is written if
 * it says the same value.
 */
void
NumberAppend(StringInfo out, Numeric number)
{
	char *exact = numeric_normalize(number);
	char digits[32];
	Decimal decimal;
	int point;

	if (!DecimalFromText(exact, &decimal) ||
		(DecimalPoint(&decimal) >= MIN_PLAIN_POINT && DecimalPoint(&decimal) <= MAX_PLAIN_POINT) ||
		!DecimalIsShortest(&decimal))
	{
		appendStringInfoString(out, exact);
		pfree(exact);
		return;
	}

	if (*exact == '-')
		appendStringInfoChar(out, '-');
	pfree(exact);

	snprintf(digits, sizeof(digits), UINT64_FORMAT, decimal.mantissa);
	point = DecimalPoint(&decimal) - 1;
	appendStringInfoChar(out, digits[0]);
	if (decimal.count > 1)
		appendStringInfo(out, ".%s", digits + 1);
	appendStringInfo(out, "e%+d", point);
}
