/* Streams of bits, lowest first: whole words at a time, into memory that goes on for SLACK bytes
 * after the last bit. */

enum { SLACK = 16 };

static inline uint64_t word_at(const uint8_t *in)
{
    uint64_t word;
    memcpy(&word, in, sizeof word);
    return word;
}

static inline uint64_t low_bits(unsigned count)
{
    return count < 64 ? ((uint64_t)1 << count) - 1 : ~(uint64_t)0;
}

/* The place of the lowest bit that is set; of none, any. */
static inline unsigned trailing_zeros(uint64_t word)
{
    return (unsigned)__builtin_ctzll(word | (uint64_t)1 << 63);
}

struct writer {
    uint8_t *to;
    uint64_t held;
    unsigned fill; /* below 64: the bits in `held`, which are in memory, too */
};

/* Append the `count` lowest bits of a word that has no others, 64 at most. */
static inline void append(struct writer *w, uint64_t bits, unsigned count)
{
    uint64_t first = w->held | bits << w->fill, rest = bits >> 1 >> (63 - w->fill);
    unsigned fill = w->fill + count;
    memcpy(w->to, &first, sizeof first);
    w->to += fill & 64 ? 8 : 0;
    w->held = fill & 64 ? rest : first;
    w->fill = fill & 63;
    memcpy(w->to, &w->held, sizeof w->held);
}

/* The byte after the stream, whose last byte is filled up with 0. */
static inline uint8_t *end_of(struct writer w) { return w.to + blocks_of(w.fill, 8); }

/* The `count` bits from bit `bit` on, 64 at most; it reads the nine bytes that they may lie in. */
static inline uint64_t bits_from(const uint8_t *in, size_t bit, unsigned count)
{
    uint64_t high = (uint64_t)in[bit / 8 + 8] << 1 << (63 - bit % 8);
    return (word_at(in + bit / 8) >> bit % 8 | high) & low_bits(count);
}

/* The bits of x at the mask's ones, side by side; and back: Warren, Hacker's Delight, 7-4 and 7-5.
 * In each of six steps, bits move by a power of two. */
struct moves {
    uint64_t of[6];
};

static inline struct moves moves_of(uint64_t mask)
{
    struct moves moves;
    uint64_t zeros = ~mask << 1; /* that count below each place */
    for (unsigned i = 0; i < 6; i++) {
        uint64_t parity = zeros;
        for (unsigned by = 1; by < 64; by *= 2)
            parity ^= parity << by;
        moves.of[i] = parity & mask;
        mask = (mask ^ moves.of[i]) | moves.of[i] >> (1u << i);
        zeros &= ~parity;
    }
    return moves;
}

static inline uint64_t extract(uint64_t x, uint64_t mask)
{
    struct moves moves = moves_of(mask);
    x &= mask;
    for (unsigned i = 0; i < 6; i++) {
        uint64_t moved = x & moves.of[i];
        x = (x ^ moved) | moved >> (1u << i);
    }
    return x;
}

static inline uint64_t deposit(uint64_t x, uint64_t mask)
{
    struct moves moves = moves_of(mask);
    for (unsigned i = 6; i--;)
        x = (x & ~moves.of[i]) | (x << (1u << i) & moves.of[i]);
    return x & mask;
}

static inline uint16_t bf16_of(float size)
{
    uint32_t bits = (uint32_t)bits_of(size);
    uint32_t rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
    return (uint16_t)(rounded < MAX_BF16_BITS ? rounded : MAX_BF16_BITS);
}

static inline float from_bf16(uint16_t bits) { return float_of((int32_t)((uint32_t)bits << 16)); }

/* The most bits that Rice coding takes for `count` numbers whose sum is at most `total`. */
static inline uint64_t rice_max_bits(uint64_t count, uint64_t total)
{
    uint64_t most = count + total;
    for (unsigned width = 1; width <= MAX_WIDTH; width++) {
        uint64_t bits = count * (width + 1) + (total >> width);
        most = bits < most ? bits : most;
    }
    return count ? most : 0;
}

static inline size_t rice_max_bytes(size_t count, size_t total)
{
    return count ? 1 + (size_t)(rice_max_bits(count, total) + 14) / 8 : 0;
}
