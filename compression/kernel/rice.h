/* Rice coding of short lists of numbers below 65536: rice.py. Included as loops.h is. */

/* The bits of one plane of 64 numbers. */
TARGET static uint64_t SET(plane_of)(const loose_u16 *numbers, unsigned plane)
{
    uint8_t bit[64];
    uint64_t word = 0;
    for (size_t i = 0; i < 64; i++)
        bit[i] = numbers[i] >> plane & 1;
    for (size_t i = 0; i < 8; i++)
        word |= word_at(bit + 8 * i) * GATHER >> 56 << 8 * i;
    return word;
}

/* Append the low `width` bits of all numbers, plane by plane; 64 numbers may be read after them. */
TARGET static struct writer SET(pack)(const loose_u16 *numbers, size_t count, unsigned width,
                                      uint8_t *out)
{
    struct writer to = {out, 0, 0};
    for (unsigned plane = 0; plane < width; plane++)
        for (size_t at = 0; at < count; at += 64) {
            unsigned some = (unsigned)least(64, count - at);
            append(&to, SET(plane_of)(numbers + at, plane) & low_bits(some), some);
        }
    return to;
}

/* The bits that the numbers' low parts and unary parts take together. */
TARGET static uint64_t SET(bits_with)(const loose_u16 *numbers, size_t count, unsigned width)
{
    uint64_t bits = (uint64_t)count * (width + 1);
    for (size_t at = 0; at < count; at += PIECE) {
        uint32_t sum = 0;
        for (size_t i = at; i < at + least(PIECE, count - at); i++)
            sum += (uint32_t)numbers[i] >> width;
        bits += sum;
    }
    return bits;
}

/* Write the numbers' unary parts; return the byte after them. */
TARGET static uint8_t *SET(write_unary)(const loose_u16 *numbers, size_t count, unsigned width,
                                        uint8_t *out)
{
    struct writer to = {out, 0, 0};
    uint64_t bits = 0; /* the next ones, `fill` of them */
    unsigned fill = 0;
    for (size_t i = 0; i < count; i++) {
        unsigned zeros = (unsigned)numbers[i] >> width;
        for (; fill + zeros > 63; bits = 0, fill = 0) {
            unsigned some = zeros < 64 - fill ? zeros : 64 - fill;
            append(&to, bits, fill + some);
            zeros -= some;
        }
        fill += zeros;
        bits |= (uint64_t)1 << fill++;
    }
    append(&to, bits, fill);
    return end_of(to);
}

/* Write a list, as rice.write does; return the byte after it. */
TARGET static uint8_t *SET(write_list)(const loose_u16 *numbers, size_t count, uint8_t *out)
{
    unsigned width = 0;
    if (!count)
        return out;
    for (uint64_t bits = SET(bits_with)(numbers, count, 0), wider; width < MAX_WIDTH; width++) {
        if ((wider = SET(bits_with)(numbers, count, width + 1)) >= bits)
            break;
        bits = wider;
    }
    *out = (uint8_t)width;
    uint8_t *unary = end_of(SET(pack)(numbers, count, width, out + 1));
    return SET(write_unary)(numbers, count, width, unary);
}

/* Read what `pack` wrote, four numbers at a time; return false if a padding bit is set. */
TARGET static bool SET(unpack)(const uint8_t *in, size_t count, unsigned width, loose_u16 *numbers)
{
    unsigned used = count * width % 8;
    for (size_t i = 0; i < count; i += 4) {
        uint64_t four = 0;
        for (unsigned plane = 0; plane < width; plane++) {
            size_t bit = plane * count + i;
            uint64_t nibble = *(const loose_u16 *)(in + bit / 8) >> bit % 8 & 15;
            four |= (nibble * SPREAD & LANES) << plane;
        }
        memcpy(numbers + i, &four, sizeof four);
    }
    return !(used && in[count * width / 8] >> used);
}

/* Add the unary parts at `in` to the low parts of `count` numbers, at least 1; return the byte
 * after them, or NULL if they do not end before `end` or if a number is above `most`. */
TARGET static const uint8_t *SET(read_unary)(const uint8_t *in, const uint8_t *end, size_t count,
                                             unsigned width, uint32_t most, loose_u16 *numbers)
{
    size_t i = 0, next = 0;
    uint64_t wrong = 0;
    for (const uint8_t *at = in; at < end; at += 8) {
        uint64_t word = word_at(at);
        size_t stop = i + least(count - i, (size_t)__builtin_popcountll(word));
        for (; i < stop; word &= word - 1) {
            size_t place = 8 * (size_t)(at - in) + (size_t)__builtin_ctzll(word);
            uint64_t number = (uint64_t)(place - next) << width | numbers[i];
            wrong |= number > most;
            numbers[i++] = (uint16_t)number;
            next = place + 1;
        }
        if (i == count) {
            const uint8_t *last = in + (next - 1) / 8;
            return wrong || last >= end || (*last >> (next - 1) % 8) != 1 ? NULL : last + 1;
        }
    }
    return NULL;
}

/* Read `count` numbers that are at most `most`, as rice.read does; return the byte after them, or
 * NULL if no correct encoder wrote them. SLACK bytes of any content may be read after `end`, and
 * `numbers` has room for three more. */
TARGET static const uint8_t *SET(read_list)(const uint8_t *in, const uint8_t *end, size_t count,
                                            uint32_t most, loose_u16 *numbers)
{
    if (!count)
        return in;
    size_t room = (size_t)(end - in), width = room ? *in : 0;
    size_t low = blocks_of(count * width, 8);
    if (width > MAX_WIDTH || room < 1 + low + blocks_of(count, 8) ||
        !SET(unpack)(in + 1, count, (unsigned)width, numbers))
        return NULL;
    return SET(read_unary)(in + 1 + low, end, count, (unsigned)width, most, numbers);
}
