/*-------------------------------------------------------------------------
 *
 * number.c
 *	  One text for one number: RFC 8785, but exact.
 *
 * RFC 8785 takes every number for a double and prints it as ECMAScript does.
 * An amount with twenty digits would then share its text, and its fingerprint,
 * with its neighbours.  So a number has ECMAScript's form where that says the
 * same value, and all its digits where it does not: in plain notation, or with an
 * exponent if plain notation takes more than 400 digits.  1e131071 would take
 * 131,072 of them: a request of a few kilobytes would fill the memory.
 *
 * Every form, read as a decimal, is the value itself.  So two values never share a
 * form; and the form depends on nothing but the value, so that one value has one.
 *
 * Pure functions: nothing here takes a lock or outlives the call.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include <math.h>

#include "common/shortest_dec.h"
#include "fmgr.h"
#include "port/pg_bswap.h"
#include "utils/builtins.h"
#include "utils/fmgrprotos.h"

#include "compat.h"
#include "number.h"

/* The most digits of plain notation: more than any double takes. */
#define MAX_PLAIN_DIGITS 400

/* What numeric_send() makes: four fields of 16 bits, then groups of four digits. */
#define WIRE_FIELDS 4
#define WIRE_NEGATIVE 0x4000
#define GROUP_DIGITS 4

/* A number as its sign, its digits without zeros around them, and a point. */
typedef struct Number
{
	bool negative;
	char *buffer; /* palloc'ed, with the digits in it */
	char *digits;
	int count;
	int point; /* where the decimal point stands in 0.DIGITS */
} Number;

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
 * DecimalFromText reads the digits of a number as the server's shortest double
 * output prints it, and ignores its sign.  Returns false, and an undefined
 * decimal, if it has more digits than any double needs.  Zero has no digits.
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
 * IsShortest returns whether ECMAScript would print exactly the digits of this
 * number, which is not zero, for the double nearest to it.
 */
static bool
IsShortest(const Number *number)
{
	Decimal decimal = {.count = number->count, .exponent = number->point - number->count};

	if (number->count > MAX_SHORTEST_DIGITS)
		return false;
	for (int i = 0; i < number->count; i++)
		decimal.mantissa = decimal.mantissa * 10 + (number->digits[i] - '0');
	return DecimalIsShortest(&decimal);
}

/*
 * WireField returns one of the numbers of 16 bits that numeric_send() makes.
 */
static uint16
WireField(const char *wire, int field)
{
	uint16 value;

	memcpy(&value, wire + field * sizeof(value), sizeof(value));
	return pg_ntoh16(value);
}

/*
 * ReadNumeric stores sign, digits and point of a numeric, the digits palloc'ed in
 * the current context.  It takes memory in proportion to the digits that are not
 * zeros at an end, however large or small the value is.  Zero has no digits.
 */
static void
ReadNumeric(Numeric numeric, Number *number)
{
	bytea *sent = DatumGetByteaP(DirectFunctionCall1(numeric_send, NumericGetDatum(numeric)));
	const char *wire = VARDATA(sent);
	int groups = WireField(wire, 0);
	int zeros = 0;
	int count = groups * GROUP_DIGITS;

	number->buffer = palloc(count + 1);
	for (int i = 0; i < groups; i++)
		snprintf(number->buffer + i * GROUP_DIGITS, GROUP_DIGITS + 1, "%04d",
				 (int) WireField(wire, WIRE_FIELDS + i));
	while (zeros < count && number->buffer[zeros] == '0')
		zeros++;
	while (count > zeros && number->buffer[count - 1] == '0')
		count--;

	number->negative = WireField(wire, 2) == WIRE_NEGATIVE;
	number->digits = number->buffer + zeros;
	number->count = count - zeros;
	number->point = ((int16) WireField(wire, 1) + 1) * GROUP_DIGITS - zeros;
	pfree(sent);
}

/*
 * HasExponent returns whether the canonical form of a number, which is not zero,
 * has an exponent.  ECMAScript's plain form, which it uses from 1e-6 to below 1e21,
 * is the exact one; beyond, its exponent form is taken if it says the same value.
 */
static bool
HasExponent(const Number *number)
{
	int plain = Max(number->point, 1) + Max(number->count - number->point, 0);

	if (plain > MAX_PLAIN_DIGITS)
		return true;
	if (number->point >= MIN_PLAIN_POINT && number->point <= MAX_PLAIN_POINT)
		return false;
	return IsShortest(number);
}

/*
 * AppendZeros appends "count" zeros, none if that is negative.
 */
static void
AppendZeros(StringInfo out, int count)
{
	for (; count > 0; count--)
		appendStringInfoChar(out, '0');
}

/*
 * AppendPlain appends a number, which is not zero, in plain notation.
 */
static void
AppendPlain(StringInfo out, const Number *number)
{
	int before = Min(Max(number->point, 0), number->count); /* digits before the point */

	if (before == 0)
		appendStringInfoChar(out, '0');
	appendBinaryStringInfo(out, number->digits, before);
	AppendZeros(out, number->point - number->count);
	if (before == number->count)
		return;
	appendStringInfoChar(out, '.');
	AppendZeros(out, -number->point);
	appendBinaryStringInfo(out, number->digits + before, number->count - before);
}

/*
 * AppendWithExponent appends a number, which is not zero, as one digit, its other
 * digits behind a point, and an exponent.
 */
static void
AppendWithExponent(StringInfo out, const Number *number)
{
	appendStringInfoChar(out, number->digits[0]);
	if (number->count > 1)
		appendStringInfoChar(out, '.');
	appendBinaryStringInfo(out, number->digits + 1, number->count - 1);
	appendStringInfo(out, "e%+d", number->point - 1);
}

/*
 * NumberAppend appends the canonical form of a number.
 */
void
NumberAppend(StringInfo out, Numeric numeric)
{
	Number number;

	ReadNumeric(numeric, &number);
	if (number.negative)
		appendStringInfoChar(out, '-');
	if (number.count == 0)
		appendStringInfoChar(out, '0');
	else if (HasExponent(&number))
		AppendWithExponent(out, &number);
	else
		AppendPlain(out, &number);
	pfree(number.buffer);
}
