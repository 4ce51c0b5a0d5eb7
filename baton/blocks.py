"""Block identity: which prefix a block of tokens is, the same in every service.

A canonical block is `BLOCK_TOKENS_DEFAULT` tokens (configurable, 16 to 256). Its id is 128 bits, chained and keyed:

    root  = BLAKE3("baton/1" || 0 || model digest || 0 || LoRA name || 0 || tenant salt)          32 bytes
    id[0] = BLAKE3-keyed(root, 16 zero bytes || tokens[0:B]      as uint32 LE)[:16]
    id[i] = BLAKE3-keyed(root, id[i-1]       || tokens[iB:(i+1)B] as uint32 LE)[:16]

so equal ids mean equal model, tenant and whole prefix, and nobody without the salt can guess one.
Only full blocks have ids. Source: the BLAKE3 paper (O'Connor, Aumasson, Neves, Wilcox-O'Hearn, 2020).
"""
